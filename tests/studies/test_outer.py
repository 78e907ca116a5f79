"""Runs of the study of outer loops that were cut go on as if they had not been."""

import pytest

from benchmarks.studies import outer

ROW = {
    "group": "tiny", "name": "DiLoCo", "method": "DiLoCo(every=7, dense=0)", "workers": 2, "steps": 50, "dense": 10, "seed": 3,
    "layers": 1, "width": 16, "batch": 1, "windows": 8, "schedule": "cosine",
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"shared": True, "inner": "Muon"}])
@pytest.mark.filterwarnings("error:.*not the weights:UserWarning")
def test_a_run_that_was_cut_ends_with_the_same_loss_and_bytes(tmp_path, monkeypatch, more):
    monkeypatch.setattr(outer, "EVERY", 20)
    monkeypatch.setattr(outer.Checkpoints, "forget", lambda self: None)  # so that its last checkpoint, of step 40, stays
    whole = outer.train(ROW | more, tmp_path)
    assert (tmp_path / "tiny, DiLoCo, seed 3" / "40").is_dir()
    cut = outer.train(ROW | more, tmp_path)
    del whole[outer.TOOK], cut[outer.TOOK]
    assert cut == whole
