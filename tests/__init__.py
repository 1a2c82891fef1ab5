"""The project's tests: unit, end to end under real torchrun, real stores, benches and soaks."""
