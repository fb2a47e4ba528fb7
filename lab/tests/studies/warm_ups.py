"""What holds for the warm-up of every base model: its bits, and what its command refuses."""

import pytest
import torch


def assert_same_bits(task, settings):
    """Of one seed the same weights, of another others; the caller's random state stays."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second, other = (
        task.warm_up(task.WarmUp(seed=s, **settings), progress=False).state_dict() for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def assert_refused(task, flags, message, folder, capsys):
    """Before any work: the folder is not even made."""
    with pytest.raises(SystemExit):
        task.main([*flags, "--output_dir", str(folder / "new")])
    assert message in capsys.readouterr().err
    assert not (folder / "new").exists()
