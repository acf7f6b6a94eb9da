"""The numbers that tokens are drawn with: of a seed alone, independent of other seeds', in every thread."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from marl.rollout.requests import UNIFORMS


def stream(seed, count=4):
    return UNIFORMS.of(seed, count)


def test_a_stream_is_philoxs_with_the_seed_as_its_key():
    for seed in (0, 7, 2**63 - 1, 2**64 + 3):
        assert stream(seed, 9) == np.random.Generator(np.random.Philox(key=seed)).random(9).tolist()


def test_a_longer_answer_begins_as_a_shorter_one_whatever_was_drawn_between():
    first = stream(5, 3)
    assert stream(6) != first
    assert stream(5, 100)[:3] == first == stream(5, 3)


def test_any_whole_number_is_a_seed_of_its_own():
    seeds = (-1, 0, 1, 2**64, -(2**64), 2**127)
    assert len({tuple(stream(seed)) for seed in seeds}) == len(seeds)


def test_streams_of_neighbouring_seeds_are_uniform_and_do_not_correlate():
    numbers = np.array([stream(seed) for seed in range(20_000)])
    assert abs(numbers.mean(0) - 0.5).max() < 0.01 and abs(numbers.var(0) * 12 - 1).max() < 0.03
    assert abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03


def test_threads_do_not_disturb_one_another():
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda i: stream(i % 5, 1000), range(400)))
    assert drawn == [stream(i % 5, 1000) for i in range(400)]
