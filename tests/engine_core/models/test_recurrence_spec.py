from __future__ import annotations

from penstock.engine_core.models.recurrence_spec import MambaSpec

SPEC = MambaSpec(heads=4, head_dim=4, groups=2, state_dim=3, width=4)


def test_ranks_divide_groups() -> None:
    share = SPEC.share(2)
    assert isinstance(share, MambaSpec)
    assert SPEC.split() == ("groups of Mamba heads", 2)
    assert (share.heads, share.groups, share.inner, share.shared) == (2, 1, 8, 3)
    assert (share.cut("in_proj"), share.cut("out_proj")) == (1, 8)


def test_its_state() -> None:
    state = SPEC.state()
    assert (state.channels, state.heads, state.key_heads, state.key_dim, state.value_dim) == (28, 4, 2, 3, 4)
    assert not state.updates
