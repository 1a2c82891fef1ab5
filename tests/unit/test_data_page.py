"""The examples of docs/data.md do what the page says."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from elastic.draws import draws_of
from elastic.loader import Loader
from elastic.options import LoaderOptions
from elastic.sampler import Plan
from elastic.seeding import sample_key, seed_sample
from tests.support.drawing import Drawing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def example(word: str) -> dict[str, Any]:
    """What the code block that holds a word defines."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (block,) = [text for text in blocks if word in text]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 (the page's own)
    return names


@pytest.mark.parametrize("workers", [0, 2])
def test_lines_of_files_are_read_by_index(tmp_path: Path, workers: int) -> None:
    page = example("index_lines")
    texts = ["one\ntwo\n\nthrée\n", "", "four\nfive"]
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    page["index_lines"](paths, tmp_path / "index.npy")
    lines = page["Lines"](paths, tmp_path / "index.npy")
    assert [lines[i] for i in range(len(lines))] == "".join(texts).splitlines(keepends=True)
    reader = Loader(
        lines,
        Plan(n=6, global_batch_size=4, order="feistel"),
        rank=0,
        options=LoaderOptions(workers=workers, start_method="fork" if workers else None),
        collate=list,
    )
    read = [text for batch in reader.epoch(1) for text in batch.micro_batches[0].data]
    assert sorted(read) == sorted(lines[i] for i in range(6))
    reader.close()


def test_the_jobs_of_the_page_ask_for_what_it_says() -> None:
    class Labelled(Drawing):
        """Every fourth sample is rare."""

        is_rare = tuple(i % 4 == 0 for i in range(8))

    wish = example("Rare")["Rare"].sampling(None, Labelled(8))
    assert wish.weights == [10.0, 1.0, 1.0, 1.0] * 2
    mixed = example("class Mixed")["Mixed"]
    data: Dataset[Any] = ConcatDataset([Drawing(5), Drawing(6), Drawing(7)])
    identity = draws_of(18, mixed.sampling(None, data), data).identity
    assert identity is not None
    assert identity["draws"] == [700_000, 200_000, 100_000]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_seeding_of_the_page_runs() -> None:
    page = example("loader_of_ones_own")
    page["loader_of_ones_own"](Drawing(8), 1, 2)
    drawn = page["in_a_getitem"](1, 2, 3)
    assert drawn.tolist() == np.random.default_rng(sample_key(1, 2, 3)).random(3).tolist()
    first = random.random()
    seed_sample(1, 2, 3)
    assert random.random() == first
