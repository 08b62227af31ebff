"""The embedded engine computes no keys and values twice, and tokens do not depend on which it has kept."""

from __future__ import annotations

import random

import pytest
import torch
from engine_cases import other_architectures
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.cache import KeptPrefixes, Prefix
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.network import Network, prefill_shape
from baton.rollout.engines.slot_table import Piece, PrefixKey, pieces_of, prefix_keys
from baton.types import Author, PolicyVersion, Segment, Trajectory

pytestmark = pytest.mark.numerics

TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Of qwen3's keys and values: 2 layers, 2 heads of 32 in float32."""
V1 = PolicyVersion("run", 1)


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(80) for _ in range(count)]


def tensors(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def observed(trajectory: Trajectory, count: int, seed: int) -> tuple[Segment, ...]:
    """The segments of a trajectory, with an observation of `count` ids."""
    version = trajectory.segments[-1].policy_version
    observation = Segment(tuple(ids(count, seed)), (0.0,) * count, version, Author.ENVIRONMENT)
    return (*trajectory.segments, observation)


def turn(engine, driver, lease_id, prompt, segments=(), *, tokens=6, **lease) -> Trajectory:
    """Generate one turn of `tokens` tokens of the trajectory with these segments."""
    num = sum(len(s.token_ids) for s in segments) + tokens
    given = driver.lease(lease_id, prompt, num, group_id=3, segments=segments, **lease)
    return driver.run(engine, [given])[lease_id]


def of_policy(trajectory: Trajectory, values) -> list:
    return [value for value, is_policy in zip(values, trajectory.is_policy, strict=True) if is_policy]


def assert_follows_the_model(trajectory: Trajectory, model, atol: float = 1e-4) -> None:
    """Compare the logprobs of the policy's tokens with one plain forward of the whole sequence."""
    prompt, response = list(trajectory.prompt_ids), trajectory.token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    behavior = of_policy(trajectory, trajectory.behavior_logprobs)
    assert behavior == pytest.approx(of_policy(trajectory, expected), abs=atol)


def prefilled(engine, action):
    """Return the result of an action, and how many tokens the engine prefilled meanwhile."""
    before = engine.stats.prefilled_tokens
    found = action()
    return found, engine.stats.prefilled_tokens - before


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def segment(count: int, version: int, author: Author = Author.POLICY) -> Segment:
    return Segment((1,) * count, (0.0,) * count, version, author)


def test_pieces_end_where_turns_begin_and_carry_the_version_of_the_next_token():
    """A prompt of 5, 3 + 2 tokens under versions 1 and 2, an observation of 4, 2 tokens under version 2."""
    env = Author.ENVIRONMENT
    turns = (segment(3, 1), segment(2, 2), segment(4, 2, env))
    assert pieces_of(Trajectory(0, 0, (1,) * 5)) == (Piece(4, None),)
    assert pieces_of(Trajectory(0, 0, (1,) * 5, turns)) == (Piece(4, 1), Piece(13, None))
    assert pieces_of(Trajectory(0, 0, (1,) * 5, (*turns, segment(2, 2)))) == (
        Piece(4, 1),
        Piece(13, 2),
        Piece(15, 2, True),
    )
    assert pieces_of(Trajectory(0, 0, (1,) * 5, turns[:2])) == (Piece(4, 1), Piece(9, 2, True))
    assert pieces_of(Trajectory(0, 0, (1,))) == (), "a prompt of one id has nothing before the first input"


def test_pieces_do_not_depend_on_how_tokens_were_reported():
    halves = (segment(1, 1), segment(2, 1), segment(1, 1, Author.ENVIRONMENT), segment(3, 1, Author.ENVIRONMENT))
    wholes = (segment(3, 1), segment(4, 1, Author.ENVIRONMENT))
    assert pieces_of(Trajectory(0, 0, (1, 2), halves)) == pieces_of(Trajectory(0, 0, (1, 2), wholes))


def test_prefill_shapes_after_other_pieces_hold_the_past_and_few_positions():
    for past in range(1, 2000):
        for length in (1, 30, 300):
            rows, padded, padded_past = prefill_shape(length, past)
            assert past <= padded_past < max(past + 64, 1.5 * past)
            assert rows == 1 or rows * (padded + padded_past) <= 2048


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_a_next_turn_prefills_the_turn_before_and_its_observation_only(embedded, load, driver):
    """A prompt of 40, turns of 6, observations of 9: 39, then 6 + 9 for each later turn."""
    engine, prompt = embedded("qwen3", max_context_tokens=256), ids(40, 0)
    grown, count = prefilled(engine, lambda: turn(engine, driver, 0, prompt))
    assert count == 39
    for number in (1, 2, 3):
        segments = observed(grown, 9, number)
        grown, count = prefilled(engine, lambda n=number, s=segments: turn(engine, driver, n, prompt, s))
        assert count == 15
    assert grown.num_policy_tokens == 24
    assert_follows_the_model(grown, load("qwen3"))


def play(engine, driver, prompts, num_turns):
    """Play episodes of all prompts together, turn by turn; return their trajectories."""
    grown = {i: driver.run(engine, [driver.lease(i, p, 4 + i % 3, group_id=i)])[i] for i, p in enumerate(prompts)}
    for number in range(1, num_turns):
        leases = []
        for i, prompt in enumerate(prompts):
            segments = observed(grown[i], 3 + 5 * (i + number) % 31, i)
            room = sum(len(s.token_ids) for s in segments) + 4 + i % 3
            leases.append(driver.lease(i, prompt, room, group_id=i, segments=segments))
        grown = driver.run(engine, leases)
    return grown


def test_kept_and_recomputed_turns_have_the_same_bits(embedded, driver, one_thread):
    """The last turn of each episode: where all turns ran; beside others; on an engine that has seen no turn."""
    prompts = [ids(n, n) for n in (5, 20, 33, 60, 61, 100, 140, 2, 1, 48)]
    engine = embedded(max_context_tokens=400)
    before = play(engine, driver, prompts, 3)
    leases = []
    for i, prompt in enumerate(prompts):
        segments = observed(before[i], 7 + 2 * i, 50 + i)
        room = sum(len(s.token_ids) for s in segments) + 8
        leases.append(driver.lease(i, prompt, room, group_id=i, segments=segments))
    kept, count = prefilled(engine, lambda: driver.run(engine, leases))
    other = embedded(max_context_tokens=400)
    crowd, full = prefilled(other, lambda: driver.run(other, leases[::-1]))
    assert count < full / 3, "the first engine has kept the earlier turns"
    single = embedded(max_context_tokens=400)
    for i in kept:
        alone = driver.run(single, [leases[i]])[i]
        assert kept[i].token_ids == crowd[i].token_ids == alone.token_ids
        assert kept[i].behavior_logprobs == crowd[i].behavior_logprobs == alone.behavior_logprobs


def test_members_of_a_group_share_the_prompt_and_extend_it_separately(embedded, driver):
    """8 members of a prompt of 30: 29 once, then 8 × (5 + 6)."""
    engine, prompt = embedded(), ids(30, 0)
    leases = [driver.lease(i, prompt, 5, group_id=1, sample_index=i) for i in range(8)]
    first, count = prefilled(engine, lambda: driver.run(engine, leases))
    assert count == 29
    assert len({tuple(t.token_ids) for t in first.values()}) == 8
    later = [
        driver.lease(i, prompt, 16, group_id=1, sample_index=i, segments=observed(first[i], 6, i)) for i in range(8)
    ]
    assert prefilled(engine, lambda: driver.run(engine, later))[1] == 8 * 11


@other_architectures
def test_turns_of_other_architectures_equal_their_plain_forward(config, tokenizer, driver):
    """The last observation crosses the 16 ids of a window, and its padding the 100 positions of the context."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = EmbeddedEngine(
        model, tokenizer, EngineSettings(slots=8, max_context_tokens=100), PolicyVersion("run", 0), ()
    )
    grown = turn(engine, driver, 0, ids(25, 0))
    grown = turn(engine, driver, 1, grown.prompt_ids, observed(grown, 4, 1))
    grown, count = prefilled(engine, lambda: turn(engine, driver, 2, grown.prompt_ids, observed(grown, 45, 2)))
    assert count == 6 + 45
    assert_follows_the_model(grown, model)


def test_bfloat16_turns_agree_with_the_plain_forward_to_its_precision(load, tokenizer, driver):
    model = load("llama").to(torch.bfloat16)
    settings = EngineSettings(slots=8, max_context_tokens=128, dtype="bfloat16")
    engine = EmbeddedEngine(model, tokenizer, settings, PolicyVersion("run", 0), ())
    grown = turn(engine, driver, 0, ids(40, 0))
    grown = turn(engine, driver, 1, grown.prompt_ids, observed(grown, 20, 1))
    assert_follows_the_model(grown, model, atol=0.1)


# ---- aborts ----------------------------------------------------------------------------------------------------------


def aborted(engine, driver, prompt, num_tokens, *, segments=(), **lease) -> Trajectory:
    """Generate `num_tokens` tokens of a lease that may have 60, and abort it."""
    given = driver.lease(7, prompt, 60, group_id=3, segments=segments, **lease)
    return driver.run(engine, [given], lambda step: engine.abort(7) if step == num_tokens else None)[7]


@pytest.mark.parametrize("num_tokens", [1, 2, 13])
def test_an_aborted_lease_resumes_without_a_prefill(num_tokens, embedded, load, driver):
    engine, prompt = embedded(), ids(20, 0)
    whole = driver.run(embedded(), [driver.lease(0, prompt, 60, group_id=3)])[0]
    partial = aborted(engine, driver, prompt, num_tokens)
    assert partial.num_tokens == num_tokens
    resumed = driver.lease(8, prompt, 60, group_id=3, segments=partial.segments)
    grown, count = prefilled(engine, lambda: driver.run(engine, [resumed]))
    assert count == 0
    assert grown[8].token_ids == whole.token_ids
    assert_follows_the_model(grown[8], load("qwen3"))


def test_an_aborted_turn_resumes_twice_and_the_next_turn_continues_from_its_beginning(embedded, load, driver):
    """Prompt 20, turn 6, observation 9; the next turn is aborted after 5 and 4 tokens and has 11."""
    engine, prompt = embedded(), ids(20, 0)
    first = turn(engine, driver, 0, prompt)
    partial = aborted(engine, driver, prompt, 5, segments=observed(first, 9, 1))
    partial, count = prefilled(engine, lambda: aborted(engine, driver, prompt, 4, segments=partial.segments))
    assert count == 0
    grown, count = prefilled(engine, lambda: turn(engine, driver, 1, prompt, partial.segments, tokens=2))
    assert count == 0
    grown, count = prefilled(engine, lambda: turn(engine, driver, 2, prompt, observed(grown, 7, 2)))
    assert count == 11 + 7
    assert_follows_the_model(grown, load("qwen3"))


def test_an_aborted_lease_resumes_on_another_engine_by_a_prefill(embedded, load, driver):
    prompt = ids(20, 0)
    partial = aborted(embedded(), driver, prompt, 13)
    other = embedded()
    grown, count = prefilled(other, lambda: turn(other, driver, 0, prompt, partial.segments))
    assert count == 19 + 13
    assert_follows_the_model(grown, load("qwen3"))


def test_other_ids_do_not_use_what_is_kept(embedded, load, driver):
    """A resume with other generated ids prefills all after the prompt."""
    engine, prompt = embedded(), ids(20, 0)
    partial = aborted(engine, driver, prompt, 6)
    changed = [(partial.token_ids[0] + 1) % 80, *partial.token_ids[1:]]
    segments = (Segment(tuple(changed), tuple(partial.behavior_logprobs), 0),)
    grown, count = prefilled(engine, lambda: turn(engine, driver, 0, prompt, segments))
    assert count == 6
    expected = turn(embedded(), driver, 0, prompt, segments)
    assert grown.token_ids == expected.token_ids
    assert grown.behavior_logprobs == pytest.approx(expected.behavior_logprobs, abs=1e-4)


# ---- versions --------------------------------------------------------------------------------------------------------


def continued(first, second, prompt, num_first: int, tokens: list[int]) -> list[float]:
    """Logprobs of tokens whose weights change after `num_first` of them, with the KV cache kept."""
    cache, feed, found = DynamicCache(), list(prompt), []
    with torch.inference_mode():
        for i, token in enumerate(tokens):
            model = first if i < num_first else second
            logits = model(torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1]
            found.append(float(torch.log_softmax(logits, -1)[token]))
            feed = [token]
    return found


def test_a_lease_that_accepts_newer_versions_resumes_with_its_old_keys_and_values(embedded, load, driver):
    """`on_new_version = "keep"`: as if it had run on while the weights were loaded."""
    engine, prompt = embedded("qwen3"), ids(20, 0)
    partial = aborted(engine, driver, prompt, 5, is_exact=False)
    engine.load_weights(tensors(load("qwen3_next")), V1)
    resumed = driver.lease(8, prompt, 12, group_id=3, segments=partial.segments, is_exact=False)
    grown, count = prefilled(engine, lambda: driver.run(engine, [resumed])[8])
    assert count == 0
    assert grown.policy_versions == [0] * 5 + [1] * 7
    expected = continued(load("qwen3"), load("qwen3_next"), prompt, 5, grown.token_ids)
    assert grown.behavior_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_turn_that_accepts_newer_versions_prefills_only_the_turn_before_it(embedded, load, driver):
    """The prompt keeps the old version's keys and values; the turn and the observation get the new one's."""
    engine, first, second = embedded("qwen3"), load("qwen3"), load("qwen3_next")
    grown = turn(engine, driver, 0, ids(20, 0), is_exact=False)
    engine.load_weights(tensors(second), V1)
    segments = observed(grown, 9, 1)
    grown, count = prefilled(engine, lambda: turn(engine, driver, 1, ids(20, 0), segments, is_exact=False, tokens=4))
    assert count == 6 + 9
    cache, everything = DynamicCache(), [*grown.prompt_ids, *grown.token_ids]
    with torch.inference_mode():
        first(torch.tensor([everything[:19]]), past_key_values=cache, use_cache=True)
        logits = (
            second(torch.tensor([everything[19:]]), past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
        )
    expected = [float(logits[i, everything[20 + i]]) for i in range(6 + 9, 6 + 9 + 4)]
    assert grown.behavior_logprobs[-4:] == pytest.approx(expected, abs=1e-4)


def test_a_new_trajectory_uses_no_older_keys_and_values(embedded, load, driver):
    engine, prompt = embedded("qwen3"), ids(20, 0)
    turn(engine, driver, 0, prompt, is_exact=False)
    engine.load_weights(tensors(load("qwen3_next")), V1)
    grown, count = prefilled(engine, lambda: turn(engine, driver, 1, prompt, is_exact=False))
    assert count == 19
    assert_follows_the_model(grown, load("qwen3_next"))


def test_a_lease_of_exactly_a_version_uses_no_older_keys_and_values(embedded, load, driver):
    """`on_new_version = "resume"`, also beside leases that have kept theirs."""
    engine, prompt = embedded("qwen3"), ids(20, 0)
    partial = aborted(engine, driver, prompt, 5, is_exact=False)
    engine.load_weights(tensors(load("qwen3_next")), V1)
    grown, count = prefilled(engine, lambda: turn(engine, driver, 8, prompt, partial.segments, version=1))
    assert count == 19 + 5
    fresh = embedded("qwen3_next")
    fresh.load_weights(tensors(load("qwen3_next")), V1)
    expected = turn(fresh, driver, 8, prompt, partial.segments, version=1)
    assert grown.token_ids == expected.token_ids
    assert grown.behavior_logprobs == expected.behavior_logprobs


@pytest.mark.parametrize("version", [PolicyVersion("run", 0), PolicyVersion("other", 1)], ids=["again", "lineage"])
def test_weights_that_replace_a_version_drop_everything(version, embedded, load, driver):
    """A version of the same number, or of a run that was resumed from an earlier checkpoint."""
    engine = embedded("qwen3")
    held = engine.held_bytes
    aborted(engine, driver, ids(20, 0), 5, is_exact=False)
    assert engine.held_bytes == held + (19 + 5) * TOKEN_BYTES
    engine.load_weights(tensors(load("qwen3_next")), version)
    assert engine.held_bytes == held


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_kept_pieces_are_bounded_and_counted_and_the_oldest_are_dropped(embedded, driver):
    """Limit 8 × 128 = 1024 tokens: of 12 prompts of 100 ids the last 10 stay."""
    engine = embedded()
    held, prompts = engine.held_bytes, [ids(101, n) for n in range(12)]
    for i, prompt in enumerate(prompts):
        driver.run(engine, [driver.lease(i, prompt, 3)])
    assert engine.held_bytes == held + 1000 * TOKEN_BYTES
    for i, count in ((11, 0), (2, 0), (0, 100), (11, 0), (3, 100)):
        assert prefilled(engine, lambda i=i: driver.run(engine, [driver.lease(50, prompts[i], 3)]))[1] == count


def test_contexts_are_kept_as_long_as_no_slot_is_needed_for_new_work(embedded, driver):
    """Of 24 slots one runs and 23 hold 2,944 tokens: 29 prompts of 100. If 20 run, half of the slots hold 1,536."""
    engine = embedded(slots=24)
    held, prompts = engine.held_bytes, [ids(101, n) for n in range(40)]
    for i, prompt in enumerate(prompts):
        driver.run(engine, [driver.lease(i, prompt, 2)])
    assert engine.held_bytes == held + 2900 * TOKEN_BYTES
    driver.run(engine, [driver.lease(50 + i, [7], 3) for i in range(20)])
    assert engine.held_bytes == held + 1500 * TOKEN_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_kept_contexts_neither_delay_new_work_nor_exceed_the_free_slots(seed, embedded, driver):
    """Random prompts, further turns, aborts, resumes and loads: in every step as many leases run as slots allow."""
    engine, rng, slots, context = embedded(slots=24), random.Random(seed), 24, 128
    held, weights = engine.held_bytes, {name: t.clone() for name, t in tensors(engine.network.model).items()}
    idle, open_leases, numbers = [], {}, iter(range(10_000))
    for step in range(100):
        if step % 25 == 24:
            engine.load_weights(weights, PolicyVersion("run", step))
        for lease_id in [next(numbers) for _ in range(rng.choice((0, 0, 1, 3, 12)) if step < 40 else 0)]:
            prompt, segments = ids(rng.choice((1, 2, 30, 70)), lease_id), ()
            if idle and rng.random() < 0.7:
                grown = idle.pop(rng.randrange(len(idle)))
                prompt, segments = grown.prompt_ids, grown.segments
                if segments and rng.random() < 0.5:
                    segments = observed(grown, rng.randint(1, 9), lease_id)
            num_tokens = sum(len(s.token_ids) for s in segments) + rng.randint(1, 12)
            if len(prompt) + num_tokens <= context:
                lease = driver.lease(lease_id, prompt, num_tokens, segments=segments, is_exact=False)
                open_leases[lease_id] = lease.trajectory
                engine.submit(lease)
        gone = [lease_id for lease_id in open_leases if rng.random() < 0.03]
        for lease_id in gone:
            engine.abort(lease_id)
        before = engine.stats.decoded_tokens
        reports = engine.step()
        running = min(slots, len(open_leases) - len(gone))
        assert engine.stats.decoded_tokens - before == running
        assert engine.held_bytes - held <= max(slots // 2, slots - running) * context * TOKEN_BYTES
        for report in reports:
            open_leases[report.lease_id] = open_leases[report.lease_id].extended(report.segments)
            if report.finish_reason is not None or report.is_aborted:
                idle.append(open_leases.pop(report.lease_id))
    assert not open_leases
    assert len(idle) > slots


def test_the_prefix_of_a_waiting_lease_is_dropped_last(embedded, driver):
    """10 prompts of 100 are kept, and the oldest one is needed by a lease that waits behind 8 others of 10 ids."""
    engine = embedded()
    prompts = [ids(101, n) for n in range(10)]
    for i, prompt in enumerate(prompts):
        driver.run(engine, [driver.lease(i, prompt, 3)])
    others = [driver.lease(20 + i, ids(11, 90 + i), 9) for i in range(8)]
    waiting = driver.lease(40, prompts[0], 3)
    assert prefilled(engine, lambda: driver.run(engine, [*others, waiting]))[1] == 80
    assert prefilled(engine, lambda: driver.run(engine, [driver.lease(41, prompts[1], 3)]))[1] == 100


def test_turns_go_on_with_the_same_bits_when_nothing_could_be_kept(embedded, driver, one_thread):
    """Between two turns 11 other prompts take all the room."""
    segments = observed(turn(embedded(), driver, 0, ids(20, 0)), 9, 1)
    kept, crowded = embedded(), embedded()
    for engine in (kept, crowded):
        turn(engine, driver, 0, ids(20, 0))
    driver.run(crowded, [driver.lease(20 + i, ids(101, i), 3) for i in range(11)])
    short, full = (prefilled(e, lambda e=e: turn(e, driver, 1, ids(20, 0), segments)) for e in (kept, crowded))
    assert (short[1], full[1]) == (15, 34)
    assert short[0].token_ids == full[0].token_ids
    assert short[0].behavior_logprobs == full[0].behavior_logprobs


def test_a_sleeping_engine_keeps_nothing(embedded, load, driver):
    engine, prompt = embedded(), ids(20, 0)
    held = engine.held_bytes
    partial = aborted(engine, driver, prompt, 5)
    assert engine.held_bytes > held
    engine.sleep()
    assert engine.held_bytes < held
    engine.wake_up()
    engine.load_weights(tensors(load("qwen3")), V1)
    assert engine.held_bytes == held
    assert prefilled(engine, lambda: turn(engine, driver, 0, prompt, partial.segments, version=1))[1] == 19 + 5


def test_earlier_pieces_are_dropped_after_the_pieces_that_need_them():
    def keys(*ends: int, first: int = 0) -> tuple[PrefixKey, ...]:
        return prefix_keys([Piece(end, 0) for end in ends], (first,) * ends[-1])

    kept = KeptPrefixes()
    chain, other = keys(4, 9, 15), keys(3, first=1)
    for one in (*chain, *other):
        kept.add(one, Prefix([], len(one.ids)))
    kept.use(chain)
    kept.use(other)
    assert (kept.num_tokens, kept.depth(chain)) == (18, 3)
    for limit, depth in ((17, 2), (11, 1), (6, 0)):
        kept.drop_oldest(limit)
        assert kept.depth(chain) == depth
    assert kept.depth(other) == 1


def test_the_key_of_a_piece_depends_on_its_version_and_on_all_ids_before_it():
    ids = tuple(range(12))
    whole = prefix_keys([Piece(4, 0), Piece(9, 0)], ids)
    assert whole == prefix_keys([Piece(4, 0), Piece(9, 0)], ids)
    assert whole[1:] == prefix_keys([Piece(9, 0)], ids, whole[0])
    assert (whole[1].begin, whole[1].ids) == (4, ids[4:9])
    others = (
        prefix_keys([Piece(4, 1), Piece(9, 0)], ids),
        prefix_keys([Piece(5, 0), Piece(9, 0)], ids),
        prefix_keys([Piece(4, 0), Piece(9, 0)], (7, *ids[1:])),
        prefix_keys([Piece(4, 0), Piece(9, 0, is_within_turn=True)], ids),
        prefix_keys([Piece(9, 0)], ids),
    )
    assert len({whole[1], *(other[-1] for other in others)}) == 6


def test_four_times_as_many_turns_need_four_times_as_many_ids_in_keys():
    def count(num_turns: int) -> int:
        pieces = [Piece(8 * i, 0) for i in range(1, num_turns + 1)]
        return sum(len(key.ids) for key in prefix_keys(pieces, (1,) * 8 * num_turns))

    assert (count(32), count(128)) == (256, 1024)


def test_a_long_prompt_is_prefilled_in_parts_with_masks_of_bounded_size():
    """A mask for all positions at once would have the square of the prompt's length."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, max_position_embeddings=4096)
    ).eval()  # fmt: skip
    network, queries = Network(model, 8, 4096), []

    def look(module, args, kwargs):
        queries.append(tuple(kwargs["attention_mask"].shape[-2:]))

    ids = [1 + 7 * i % 50 for i in range(2500)]
    with model.base_model.register_forward_pre_hook(look, with_kwargs=True):
        (parts,) = network.prefill([ids])
    assert queries == [(1024, 1024), (1024, 2048), (512, 2560)]
    whole = model(torch.tensor([ids]), use_cache=True).past_key_values
    half = len(whole.layers)
    for layer, keys, values in zip(whole.layers, parts.tensors[:half], parts.tensors[half:], strict=True):
        assert torch.allclose(layer.keys[0].transpose(0, 1), keys, atol=1e-4)
        assert torch.allclose(layer.values[0].transpose(0, 1), values, atol=1e-4)
