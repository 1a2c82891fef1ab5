"""How a test's agents see the project: as an installed distribution, or as a bare clone.

torchrun finds the project's entry point by the metadata of installed distributions. A folder with such
metadata on PYTHONPATH installs it for one process tree; a folder with metadata of the same name and
without entry points hides an installation, since the first distribution of a name wins.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "elastic-trainer"


def write_distribution(folder: Path, *, entry_point: bool) -> Path:
    """Write the metadata of the project into a folder for PYTHONPATH; return the folder."""
    info = folder / "elastic_trainer-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.1.0\n")
    if entry_point:
        text = "[torchrun.handlers]\nelastic = elastic.hook:handlers\nfsspec = elastic.plugin:handlers\n"
        (info / "entry_points.txt").write_text(text)
    return folder


def python_path(folder: Path, *, installed: bool) -> str:
    """PYTHONPATH of agents that find the project installed, or not at all."""
    metadata = write_distribution(folder, entry_point=installed)
    return f"{metadata}:{ROOT}" if installed else str(metadata)
