"""Every learner learns: what two agents can only reach together, over several seeds, above what one of them reaches while the
other is frozen.

Split information: each of two agents holds one number, the answer is their sum mod 10, and a message is worth nothing to
whom it comes from. With one agent frozen it ends at .50 (see FROZEN).
"""

from pathlib import Path

import pytest

from marl.main import run
from marl.quickstart.assets import RECIPES, ensure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FROZEN = 0.60
"""No agent alone gets there: .50 to .56 over seeds 0 to 2 with the other one frozen, which is asserted below."""
INFLUENCE = "credit=influence_undiscounted"
TEAM = ("credit=team", "credit.of=final")
PIONEER = ("runner=pioneer_observer", "runner.peer_template='{agent} said {text}'", "runner.separator=' '")
FIVE = ("ippo", "mappo", "happo", "qmix")
SPLIT = {
    "grpo": (INFLUENCE,),
    "rloo": (INFLUENCE,),
    "dr_grpo": (INFLUENCE,),
    "reinforce_plus_plus": (INFLUENCE,),
    "gspo": (INFLUENCE, "actor_rollout_ref.actor.ppo_epochs=2"),
    "dapo": (INFLUENCE, "actor_rollout_ref.actor.ppo_epochs=2"),
    "dr_mas": (INFLUENCE,),
    "at_grpo": ("credit=mixed", "credit.of=final", "credit.weight=4"),
    "magrpo": TEAM,
    "rae": (INFLUENCE,),
    "ippo": (INFLUENCE,),
    "mappo": (INFLUENCE,),
    "happo": (INFLUENCE,),
    "cory": ("credit=joint", *PIONEER),
}
GAME = {"vdn": (), "qmix": ()}


@pytest.fixture
def learn(compose_config, tmp_path):
    def learn(seed, *overrides, name="split_information"):
        here = (f"seed={seed}", f"trainer.default_local_dir={tmp_path}", "resources.one_process=true")
        config = compose_config(*here, *overrides, name=name)
        ensure(Path(config.assets), RECIPES[config.task], config.seed)
        history = run(config).history
        return history[min(history)], history[max(history)]

    return learn
