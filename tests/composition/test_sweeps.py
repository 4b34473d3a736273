"""Which jobs a sweep has."""

from __future__ import annotations

from pathlib import Path

import pytest

from modalities.composition.sweeps import jobs_of
from modalities.exceptions import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text("a: 1\n")
    return path


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        ((), [()]),
        (("a=1",), [("a=1",)]),
        (("a=1,2",), [("a=1",), ("a=2",)]),
        (
            ("a=1,2", "b=x", "c=p,q"),
            [("a=1", "b=x", "c=p"), ("a=1", "b=x", "c=q"), ("a=2", "b=x", "c=p"), ("a=2", "b=x", "c=q")],
        ),
        (("a=range(1,4)",), [("a=1",), ("a=2",), ("a=3",)]),
        (("a=choice(x,'y, z')",), [("a=x",), ("a=y\\,\\ z",)]),
        (("+a=1,2",), [("+a=1",), ("+a=2",)]),
        (("a=[1,2],[3]",), [("a=[1,2]",), ("a=[3]",)]),
        (("a='1,2'",), [("a='1,2'",)]),
    ],
)
def test_words_with_several_values_are_multiplied(
    file: Path, words: tuple[str, ...], jobs: list[tuple[str, ...]]
) -> None:
    assert jobs_of(file, words) == jobs


def test_lists_below_sweep_are_swept_as_in_existing_files(file: Path) -> None:
    file.write_text("sweep: {n: [1, 2], name: [x], fixed: 3}\na: ${sweep.n}\n")
    assert jobs_of(file, ()) == [("sweep.n=1", 'sweep.name="x"'), ("sweep.n=2", 'sweep.name="x"')]
    assert jobs_of(file, ("sweep.n=5",)) == [("sweep.n=5", 'sweep.name="x"')]


def test_a_glob_chooses_among_options(file: Path) -> None:
    options = {"optimizer": ["adam", "adam_w", "fast"]}

    def of(key: str) -> list[str]:
        return options.get(key, [])

    assert jobs_of(file, ("optimizer=glob(adam*)",), of) == [("optimizer=adam",), ("optimizer=adam_w",)]
    assert jobs_of(file, ("optimizer=glob(*,exclude=adam*)",), of) == [("optimizer=fast",)]
    with pytest.raises(ConfigError, match="options: adam, adam_w, fast"):
        jobs_of(file, ("optimizer=glob(x*)",), of)
    with pytest.raises(ConfigError, match="among the options of a group"):
        jobs_of(file, ("optimizer.lr=glob(*)",), of)


def test_an_interval_is_no_list_of_values(file: Path) -> None:
    with pytest.raises(ConfigError, match="an interval has no end of values"):
        jobs_of(file, ("a=interval(0,1)",))


def test_a_word_that_is_none_is_told(file: Path) -> None:
    with pytest.raises(ConfigError, match="it has no `=`"):
        jobs_of(file, ("a=1,2", "b"))
