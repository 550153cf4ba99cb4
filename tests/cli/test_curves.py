"""The curves as drawn, checked as axes rather than as pixels."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from peagle.cli.curves import draw_curves


def entry(step: int, length: float | None = None) -> dict:
    accuracy = None if length is None else [0.8, 0.5, 0.2]
    drawn = accuracy and [share / 2 for share in accuracy]
    return {
        "step": step,
        "loss": 5.0 / step,
        "accuracy": accuracy,
        "acceptance_length": length,
        "drawn_accuracy": drawn,
        "drawn_acceptance_length": length and length / 2,
    }


@pytest.fixture
def figure(monkeypatch) -> list[Figure]:
    """The figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def remember(self, *arguments, **options):
        saved.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", remember)
    return saved


def test_three_panels_with_units(figure: list[Figure], tmp_path: Path):
    found = [entry(10), entry(20, 2.5), entry(30), entry(40, 3.5), entry(50, 3.0)]
    draw_curves(found, "cross_entropy", tmp_path / "curves.png")
    loss, accuracy, length = figure[0].axes
    assert [axes.get_xlabel() for axes in figure[0].axes] == ["step"] * 3
    assert [axes.get_ylabel() for axes in figure[0].axes] == [
        "cross-entropy (nats)",
        "elements (%)",
        "tokens per cycle",
    ]
    assert list(loss.lines[0].get_xdata()) == [10, 20, 30, 40, 50]
    assert [line.get_label() for line in accuracy.lines[::2]] == ["0", "1", "2"]
    assert list(accuracy.lines[2].get_ydata()) == [50.0] * 3
    assert list(accuracy.lines[3].get_ydata()) == [25.0] * 3
    assert {line.get_linestyle() for line in accuracy.lines[1::2]} == {"--"}
    assert len({line.get_color() for line in accuracy.lines}) == 3
    assert list(length.lines[1].get_ydata()) == [1.25, 1.75, 1.5]
    assert list(length.lines[2].get_xdata()) == [40]
    assert length.lines[2].get_label() == "best: 3.50 at step 40"


def test_one_evaluation_is_a_dot(figure: list[Figure], tmp_path: Path):
    draw_curves([entry(1, 2.0)], "kl", tmp_path / "curves.png")
    assert figure[-1].axes[1].lines[0].get_marker() == "o"


def test_it_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    path = tmp_path / "curves.png"
    draw_curves([entry(10, 2.0)], "kl", path)
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")

    def cut_short(self, place, **_):
        Path(place).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", cut_short)
    with pytest.raises(OSError, match="no space left"):
        draw_curves([entry(10, 2.0), entry(20, 3.0)], "kl", path)
    assert path.read_bytes() == first
