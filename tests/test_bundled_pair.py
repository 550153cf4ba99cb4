import pytest

from peagle.errors import InputError
from peagle.pair import bundled


def test_the_bundled_pair_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.pair.PLACE", tmp_path)
    (tmp_path / "peagle").mkdir()
    (tmp_path / "peagle" / "config.json").write_text("{}")
    assert bundled("peagle") == tmp_path / "peagle"
    with pytest.raises(InputError, match=r"lacks the bundled target .*recipes/demo"):
        bundled("target")
