"""States that a checkpoint must hold, and a run must read of it, to go on from there."""

import pytest

from marl.config.errors import ConfigError
from marl.preflight.run_folder import must_hold_all_states
from marl.utils.manifest import seal


@pytest.fixture
def origin(tmp_path):
    """A checkpoint of two policies with a critic each, as one rank saved them."""
    parts = [f"{name}/{kind}" for name in ("alice", "carol") for kind in ("actor", "critic")]
    for part in parts:
        (tmp_path / part).mkdir(parents=True)
        for file in ("model", "optim", "extra_state"):
            (tmp_path / part / f"{file}_world_size_1_rank_0.pt").write_text("x")
    seal(tmp_path, {"world_size": dict.fromkeys(parts, 1)})
    return tmp_path


@pytest.mark.parametrize("sharing", ["individual", "lora"])
@pytest.mark.parametrize("read", ["model", "model,optimizer"])
def test_a_critic_does_not_go_on_without_its_optimizer_whatever_its_policy_is(compose_config, origin, sharing, read):
    """An adapter's checkpoint always holds all; its critic's is verl's, of the same name."""
    config = compose_config("learner=ippo", f"sharing={sharing}", f"critic.checkpoint.load_contents=[{read}]")
    with pytest.raises(
        ConfigError, match="critic.checkpoint.load_contents=.*: alice/critic of .* would go on without its"
    ):
        must_hold_all_states(config, origin)


@pytest.mark.parametrize("sharing", ["individual", "lora"])
def test_a_critic_that_was_saved_without_its_optimizer_is_named(compose_config, origin, sharing):
    config = compose_config("learner=ippo", f"sharing={sharing}")
    must_hold_all_states(config, origin)
    (origin / "carol" / "critic" / "optim_world_size_1_rank_0.pt").unlink()
    with pytest.raises(ConfigError, match="holds no optimizer of carol/critic: critic.checkpoint.save_contents"):
        must_hold_all_states(config, origin)
