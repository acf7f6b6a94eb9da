"""Methods beside reinforcement learning, on real workers in one process."""

import json
import math
from functools import partial

import pytest
import torch
from verl.workers.utils.losses import sft_loss

from marl.data.rows import read_table
from marl.main import run
from marl.methods.examples import encoded, policy_rows
from marl.report import dump
from marl.rollout.hf import LOCAL_SERVERS
from tests.builders import slow_but
from tests.stack.builders import ADAPTED, ADAPTERS, SAME, parameters

BATCH = 4
LONG = ("data.max_response_length=6", "data.max_prompt_length=60")
"""A cold model seldom ends an answer within three tokens, and what is cut off is not imitated."""
MOVES = "actor_rollout_ref.actor.optim.lr_warmup_steps=0"


@pytest.fixture
def rows(tmp_path):
    def write(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def sums(count, start=0):
    return [
        {"prompt": f"what is {i % 9} plus {i % 5} ?", "answer": f"#### {i % 9 + i % 5}"}
        for i in range(start, start + count)
    ]


def pairs(count):
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"#### {(i + 7) % 18}"}
        for i, row in enumerate(sums(count))
    ]


def talks(count):
    """Conversations of two answers, whose turns may share a row."""
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": "#### 3"},
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in sums(count)
    ]


def offline(alone, path, *words, val=None):
    return alone(f"data.train_files={path}", f"data.val_files={val or 'null'}", *words)


def first_batch(live, policy="alice", pack=None):
    """Rows of the first examples for one policy."""
    trainer = live.trainer
    examples = [example for i in range(BATCH) for example in trainer.loader.dataset[i]]
    return policy_rows(examples, trainer.packed if pack is None else pack)[policy]


def engine_of(live, policy="alice"):
    return live.trainer.policies[policy].workers.worker.actor.engine


def flat_gradient(engine):
    return torch.cat([p.grad.to_local().flatten().clone() for p in engine.module.parameters() if p.grad is not None])


def descended(live, rows, policy="alice"):
    """The gradient that the engine is about to apply, and the metrics of the update."""
    group, engine, kept = live.trainer.policies[policy], engine_of(live, policy), []
    engine.optimizer_step = lambda: kept.append(flat_gradient(engine)) or 0.0
    try:
        metrics = live.wait(live.trainer.method.fit(rows, group))
    finally:
        del engine.optimizer_step
    return kept[0], metrics


def log_probs_of(engine, row):
    """The log-probs of a row's response, straight from the model's logits."""
    prompt, response = row["prompts"], row["responses"]
    ids = torch.cat([prompt, response])[None]
    logits = engine.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, response[:, None])[:, 0]


def each(rows):
    return [{key: rows[key].unbind()[i] for key in ("prompts", "responses", "response_mask")} for i in range(len(rows))]


def plain_gradient(engine, loss):
    engine.optimizer.zero_grad()
    loss.backward()
    gradient = flat_gradient(engine)
    engine.optimizer.zero_grad()
    return gradient


def assert_same(one, other, share=1e-5):
    assert float((one - other).norm()) <= share * float(other.norm()) and float(other.norm()) > 0


def test_sft_descends_the_mean_of_all_trained_tokens_and_packing_changes_nothing(alone, rows):
    live = offline(alone, rows("talks", talks(8)), "method=sft", "data.max_prompt_length=60")
    assert not LOCAL_SERVERS, "nothing is played: there is no server"
    packed, apart = (first_batch(live, pack=pack) for pack in (True, False))
    assert len(packed) == BATCH and len(apart) == 2 * BATCH
    (one, metrics), (other, _) = descended(live, packed), descended(live, apart)
    engine = engine_of(live)
    parts = [(log_probs_of(engine, row), row["response_mask"]) for row in each(apart)]
    loss = -sum((p * mask).sum() for p, mask in parts) / sum(int(mask.sum()) for _, mask in parts)
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    exact = plain_gradient(engine, loss)
    assert_same(one, exact)
    assert_same(other, exact)


@pytest.mark.slow
def test_sft_is_verls_sft_loss(alone, rows, monkeypatch):
    live = offline(alone, rows("talks", talks(8)), "method=sft", "data.max_prompt_length=60")
    batch, worker = first_batch(live), live.trainer.policies["alice"].workers.worker.actor
    ours, metrics = descended(live, batch)
    monkeypatch.setattr(worker, "loss_fn", partial(verls, partial(sft_loss, config=None)))
    theirs, found = descended(live, batch)
    assert_same(ours, theirs)
    assert metrics["loss"] == pytest.approx(found["loss"], rel=1e-6)


def verls(loss, model_output, data, dp_group=None):
    """verl's loss wants a mask as long as the whole row."""
    data, masks = data.copy(), data["loss_mask"].unbind()
    whole = [torch.cat([torch.zeros_like(p), m]) for p, m in zip(data["prompts"].unbind(), masks, strict=True)]
    data["loss_mask"] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
    return loss(model_output=model_output, data=data)


@pytest.mark.parametrize("loss", slow_but(["sigmoid", "ipo", "hinge"], "sigmoid"))
def test_dpo_descends_the_loss_of_its_pairs_wherever_micro_batches_cut(alone, rows, loss):
    """After two updates, so that the log-ratios are not 0; micro-batches of a row or two."""
    words = (
        "method=dpo",
        f"method.loss={loss}",
        "method.beta=0.5",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=50",
    )
    live = offline(alone, rows("pairs", pairs(8)), *words)
    before = live.step()
    if loss == "sigmoid":
        assert before["agent/alice/loss"] == pytest.approx(math.log(2), abs=1e-6), "the reference is the policy"
    live.step()
    batch = first_batch(live)
    ours, metrics = descended(live, batch)
    actor, reference = engine_of(live), live.trainer.policies["alice"].workers.worker.ref.engine
    margins = []
    for chosen, rejected in zip(*[iter(each(batch))] * 2, strict=True):
        sides = [
            log_probs_of(actor, row).sum() - log_probs_of(reference, row).detach().sum() for row in (chosen, rejected)
        ]
        margins.append(sides[0] - sides[1])
    h = torch.stack(margins)
    exact = {
        "sigmoid": -torch.nn.functional.logsigmoid(0.5 * h),
        "ipo": (h - 1 / (2 * 0.5)) ** 2,
        "hinge": torch.relu(1 - 0.5 * h),
    }[loss].mean()
    assert float(h.detach().abs().min()) > 1e-4
    assert metrics["loss"] == pytest.approx(float(exact), rel=1e-5)
    assert_same(ours, plain_gradient(actor, exact), share=1e-4)


IN_OTHER_LAYERS = (
    "+policies.alice.model.target_modules=[layers.0.self_attn.q_proj]",
    "+policies.carol.model.target_modules=[layers.1.self_attn.q_proj]",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [ADAPTERS, ADAPTED, (*ADAPTED, *IN_OTHER_LAYERS)],
    ids=["lora", "shared base", "in other layers"],
)
def test_adapters_in_bf16_are_trained_though_their_reference_comes_first(alone, rows, options):
    """The first forward pass of all is one in which nothing can be trained, and FSDP2 settles its dtypes in the first."""
    live = offline(alone, rows("pairs", pairs(8)), "method=dpo", "precision=bf16", *options)
    first, second = live.step(), live.step()
    for agent in ("alice", "carol"):
        assert first[f"agent/{agent}/loss"] == pytest.approx(math.log(2), abs=1e-3)
        assert first[f"agent/{agent}/grad_norm"] > 0 and second[f"agent/{agent}/preference_margin"] != 0, "it moved"


@pytest.mark.slow
def test_madpo_descends_one_loss_of_all_agents(alone, rows):
    """Both policies' gradients, after two updates, against autograd through one sigmoid of both models' log-probs."""
    said = [row | {key: {"alice": row[key], "carol": "#### 2"} for key in ("chosen", "rejected")} for row in pairs(8)]
    for i, row in enumerate(said):
        row["rejected"]["carol"] = f"#### {3 + i % 4}"
    live = offline(alone, rows("pairs", said), "method=madpo", "method.beta=0.5")
    assert live.step()["agent/alice/loss"] == pytest.approx(math.log(2), abs=1e-6)
    live.step()
    batch = {policy: first_batch(live, policy) for policy in ("alice", "carol")}
    parts, kept = [], {}
    for policy, own in batch.items():
        actor, reference = engine_of(live, policy), live.trainer.policies[policy].workers.worker.ref.engine
        ratios = [log_probs_of(actor, row).sum() - log_probs_of(reference, row).detach().sum() for row in each(own)]
        parts.append(torch.stack(ratios[::2]) - torch.stack(ratios[1::2]))
        actor.optimizer_step = lambda engine=actor, policy=policy: kept.update({policy: flat_gradient(engine)}) or 0.0
    try:
        found = live.wait(live.trainer.method.update(batch, live.trainer.policies))
    finally:
        for policy in batch:
            del engine_of(live, policy).optimizer_step
    exact = -torch.nn.functional.logsigmoid(0.5 * (parts[0] + parts[1])).mean()
    assert all(float(h.detach().abs().min()) > 1e-4 for h in parts), "both agents' margins count"
    assert [own["loss"] for own in found.values()] == pytest.approx([float(exact)] * 2, rel=1e-5)
    for policy in batch:
        engine_of(live, policy).optimizer.zero_grad()
    exact.backward()
    for policy in batch:
        assert_same(kept[policy], flat_gradient(engine_of(live, policy)), share=1e-4)


@pytest.mark.slow
def test_adapters_are_compared_with_their_base_and_trained_alone(alone, rows):
    live = offline(alone, rows("pairs", pairs(8)), "method=dpo", *ADAPTED)
    step = live.step()
    for agent in ("alice", "carol"):
        assert step[f"agent/{agent}/loss"] == pytest.approx(math.log(2), abs=1e-6)
    steps = [live.step() for _ in range(4)]
    assert steps[-1]["agent/alice/preference_margin"] > 0
    assert live.trainer.policies["alice"].workers.worker.ref is None


@pytest.mark.slow
def test_spin_with_a_fixed_opponent_is_dpo_on_those_pairs(alone, rows, demonstrated):
    """The same pairs, the same derivatives, the same weights, to the last bit."""
    spin = alone("method=spin", "runner=single_turn", *LONG, MOVES, f"data.train_files={demonstrated}")
    trainer, before = spin.trainer, parameters(spin, "policies")
    episodes = taught(spin.episodes(samples=2))
    selection = trainer.method.of_episodes(episodes, trainer.speakers)
    ended = [
        example for example in selection.examples if not example.sides[1][0].truncated
    ]  # a row's answer always ends
    written = [
        {"prompt": chosen.observation, "chosen": chosen.text, "rejected": rejected.text, "agent": chosen.agent}
        for (chosen,), (rejected,) in (example.sides for example in ended)
    ]
    examples = [encoded(example, trainer.encoders) for example in ended]
    played = policy_rows(examples, trainer.packed)["alice"]
    metrics = [live_fit(spin, played) for _ in range(2)]
    dpo = offline(alone, rows("pairs", written), "method=dpo", f"data.train_batch_size={len(written)}", *LONG, MOVES)
    items = dpo.trainer.loader.dataset
    read = policy_rows([example for i in range(len(items)) for example in items[i]], dpo.trainer.packed)["alice"]
    assert len(read) == len(played) >= 8
    assert [row.tolist() for row in read["input_ids"].unbind()] == [
        row.tolist() for row in played["input_ids"].unbind()
    ]
    found = [live_fit(dpo, read)["loss"] for _ in range(2)]
    assert found == [numbers["loss"] for numbers in metrics]
    assert found[0] == pytest.approx(math.log(2), abs=1e-6) and found[1] < found[0]
    pair = zip(parameters(spin, "policies"), parameters(dpo, "policies"), strict=True)
    assert all(torch.equal(one, other) for one, other in pair)
    assert not all(map(torch.equal, before, parameters(spin, "policies")))


def live_fit(live, rows):
    return live.wait(live.trainer.method.fit(rows, live.trainer.policies["alice"]))


def taught(episodes):
    """The episodes, each with the data's answer."""
    for episode in episodes:
        object.__setattr__(episode.task, "extra", {**episode.task.extra, "answer": f"#### {episode.task.ground_truth}"})
    return episodes


def held_by_servers(live, policy="alice"):
    group = live.trainer.policies[policy]
    return live.wait(group.held_weights(1))[0].digest


def weights_of(live, policy="alice"):
    return live.wait(live.trainer.policies[policy].weight_digest(1))


@pytest.fixture
def demonstrated(rows, cold_assets):
    """The embedded tasks, with an answer in ``extra_info``."""
    table = read_table(str(cold_assets / "train.parquet")).to_pylist()
    for row in table:
        row["extra_info"]["answer"] = f"#### {row['reward_model']['ground_truth']}"
    return rows("demonstrated", table)


@pytest.mark.slow
def test_an_opponent_stays_until_it_is_renewed_and_validations_are_the_policys(alone, demonstrated, monkeypatch):
    words = ("method=spin", "trainer.ref_update_freq=2", *LONG, MOVES)
    live = alone(*words, f"data.train_files={demonstrated}")
    first = weights_of(live)
    assert held_by_servers(live) == first
    live.step()
    assert weights_of(live) != first and held_by_servers(live) == first, "the policy moved, its opponent did not"
    seen, measure = [], live.trainer.controller.measure

    async def look(*arguments):
        seen.append((await live.trainer.policies["alice"].held_weights(1))[0].digest)
        return await measure(*arguments)

    monkeypatch.setattr(live.trainer.controller, "measure", look)
    live.wait(live.trainer.validate())
    assert seen == [weights_of(live)] and held_by_servers(live) == first
    live.step()
    assert held_by_servers(live) == weights_of(live) != first, "renewed after step 2"
    moved = weights_of(live)
    live.step()
    assert held_by_servers(live) == moved != weights_of(live)


@pytest.mark.slow
def test_rejection_sampling_imitates_what_it_keeps_and_nothing_else(alone, monkeypatch):
    live = alone("method=rft", "method.min_score=null", "method.best_of=2", *LONG, MOVES)
    kept, learn = [], live.trainer.learn

    async def look(examples, phase):
        kept.extend(examples)
        return await learn(examples, phase)

    monkeypatch.setattr(live.trainer, "learn", look)
    live.trainer.restarts = 2
    metrics = live.step()
    assert metrics["method/examples"] == len(kept) > 0 and metrics["perf/restarts"] == 2
    assert metrics["method/kept_episodes"] == 0.5 and len(kept) <= 8, "two of the four samples of every task"
    tokens = sum(sum(turn.response_mask) for e in kept for turn in e.sides[0] if turn.agent == "alice")
    assert metrics["agent/alice/trained_tokens"] == tokens
    monkeypatch.setattr(live.trainer.method.config, "min_score", 2.0)
    before = parameters(live, "policies")
    metrics = live.step()
    assert metrics["method/examples"] == metrics["method/kept_episodes"] == 0 and "agent/alice/loss" not in metrics
    assert all(map(torch.equal, before, parameters(live, "policies")))


@pytest.mark.slow
def test_a_dump_of_good_episodes_is_imitated_turn_by_turn(alone, tmp_path):
    """The ids of the dump's texts are those that were played, where the answers ended."""
    played = alone(*LONG)
    episodes = played.episodes()
    path = dump.write(episodes, 1, tmp_path / "dumps")
    live = offline(alone, path, "method=sft", "method.source=episodes", "method.min_score=null", *LONG)
    expected = [
        [(turn.agent, turn.round, turn.prompt_ids, turn.response_ids) for turn in episode.path if not turn.truncated]
        for episode in sorted(episodes, key=lambda episode: (episode.task.id, -episode.scored.value, episode.sample))
        if episode.failure is None
    ]
    data = live.trainer.loader.dataset
    found = [
        [(turn.agent, turn.round, turn.prompt_ids, turn.response_ids) for turn in data[i][0].sides[0]]
        for i in range(len(data))
    ]
    assert found == [turns for turns in expected if turns] and len(found) > 4


@pytest.mark.slow
def test_peers_turns_are_predicted_beside_own_ones_and_own_turns_are_not(alone, tmp_path):
    """The gradient of the mean over own tokens and a weighted one over predicted tokens, straight from the model."""
    episodes = alone(*LONG).episodes()
    path = dump.write(episodes, 1, tmp_path / "dumps")
    options = ("method.min_score=null", "method.peers_weight=0.3", "method.peers_request='{agent} ?'")
    live = offline(alone, path, "method=world_model", *options, *LONG)
    batch, method = first_batch(live), live.trainer.method
    assert {"alice"} == {agent for agent, peer in method.pairs} - {"carol"} and set(batch["side"].tolist()) == {0, 1}
    ours, metrics = descended(live, batch)
    engine = engine_of(live)
    parts = [[], []]
    for row, side in zip(each(batch), batch["side"].tolist(), strict=True):
        parts[side].append(log_probs_of(engine, row)[row["response_mask"].bool()])
    own, peers = (-torch.cat(found).mean() for found in parts)
    assert metrics["peers_loss"] == metrics["peers_loss/alice/carol"] == pytest.approx(float(peers), rel=1e-5)
    assert metrics["loss"] == pytest.approx(float(own + 0.3 * peers), rel=1e-5)
    assert_same(ours, plain_gradient(engine, own + 0.3 * peers))
    said = {turn.text for episode in episodes for turn in episode.path if turn.agent == "carol"}
    sides = [example.sides for i in range(BATCH) for example in live.trainer.loader.dataset[i]]
    predicted = [turn for own in sides for turn in own[1 + method.pairs.index(("alice", "carol"))]]
    assert predicted and {turn.text for turn in predicted} <= said
    assert all(turn.observation[-1]["content"].endswith("carol ?") and turn.policy == "alice" for turn in predicted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "imitated"), [(("method.sft_steps=2",), 2), (("method.sft_steps=3", "method.until=0.0"), 1)]
)
def test_a_hybrid_imitates_by_steps_or_until_it_is_good_enough(alone, rows, words, imitated):
    live = alone("method=hybrid", f"method.files=[{rows('sft', sums(16))}]", *words)
    phases = []
    for step in range(1, 5):
        live.trainer.step_number = step
        metrics = live.wait(live.trainer.method.step(live.trainer, live.wait(live.trainer.tasks.next())))
        live.wait(live.trainer.validate())
        phases.append(metrics["method/imitates"])
        assert ("agent/alice/pg_loss" in metrics) == (not phases[-1]) and metrics["perf/restarts"] == 0
    live.wait(live.trainer.dumps.flush())
    assert phases == [1.0] * imitated + [0.0] * (4 - imitated)


METHODS = {
    "sft": ("method=sft", "method.answer_key=extra_info.answer"),
    "dpo": ("method=dpo", "method.chosen_key=extra_info.answer", "method.rejected_key=reward_model.ground_truth", "trainer.ref_update_freq=1"),
    "madpo": ("method=madpo", "method.source=play", "method.beta=1.0", *LONG),
    "world_model": (
        "method=world_model", "method.source=play", "method.min_score=null", "runner.foresee=true", "runner.foresee_request='{agent} ?'",
        "runner.foreseen_template='{agent} said {text}'", "data.max_prompt_length=100",
    ),
    "peers": (
        "method=rft", "method.min_score=null", "method.peers_weight=0.5", "+agents.bob={}", "data.max_prompt_length=100", "credit=own",
    ),
    "spin": ("method=spin", "trainer.ref_update_freq=1"),
    "rft": ("method=rft", "method.min_score=null", "method.best_of=1"),
    "hybrid": ("method=hybrid", "method.sft_steps=1", "method.answer_key=extra_info.answer"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_unbroken_one(compose_config, cold_assets, demonstrated, tmp_path, name):
    """Three steps, or two and one: hybrid is saved after its first step of play."""

    def train(folder, steps):
        words = [
            *METHODS[name],
            f"data.train_files={demonstrated}",
            f"trainer.default_local_dir={tmp_path / folder}",
            MOVES,
        ]
        words += ["method.files=[${data.train_files}]"] if name == "hybrid" else []
        words += [f"data.val_files={demonstrated}"] if name in ("sft", "dpo") else []
        here = (
            f"assets={cold_assets}",
            "resources.one_process=true",
            "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=2",
        )
        often = (
            "trainer.save_freq=2",
            f"trainer.total_training_steps={steps}",
            "trainer.logger=[file]",
            "trainer.test_freq=2",
        )
        run(compose_config(*here, *often, *words))
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        return {
            line["step"]: {
                k: v for k, v in line["data"].items() if k.split("/")[-1] in SAME and not k.startswith("timing")
            }
            for line in lines
        }

    whole = train("whole", 3)
    train("broken", 2)
    broken = train("broken", 3)
    differing = {
        (step, key): (own[key], broken[step].get(key))
        for step, own in whole.items()
        for key in own
        if own[key] != broken[step].get(key)
    }
    assert not differing and whole.keys() == broken.keys() >= {1, 2, 3}
    for policy in ("alice", "carol"):
        paths = [
            tmp_path / f / "global_step_3" / policy / "actor/huggingface/model.safetensors" for f in ("whole", "broken")
        ]
        assert paths[0].read_bytes() == paths[1].read_bytes()
