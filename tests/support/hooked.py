"""An environment in which this clone counts as an installed package, so that torchrun loads its entry point."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def installed(folder: Path, environ: dict[str, str]) -> dict[str, str]:
    """Write the metadata of an installation into a folder; return the environment that makes Python see it."""
    metadata = folder / "elastic_trainer-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elastic-trainer\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\nelastic = elastic.hook:handlers\n")
    path = [str(folder), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": ":".join(path)}
