"""Prometheus metrics of a server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from marl.serving.gate import Gate

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Measures:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, gate: Gate) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("marl_requests", "Requests that ended", ["model", "status"], registry=registry)
        self.seconds = Histogram(
            "marl_request_seconds", "Seconds of a request", ["model"], buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("marl_tokens", "Tokens of all turns", ["kind"], registry=registry)
        self.turns = Counter("marl_turns", "Turns that agents took", ["agent"], registry=registry)
        Gauge("marl_episodes_playing", "Episodes being played", registry=registry).set_function(lambda: gate.playing)
        Gauge("marl_episodes_waiting", "Episodes in the queue", registry=registry).set_function(lambda: gate.waiting)

    def ended(self, model: str, status: int, seconds: float) -> None:
        self.requests.labels(model, str(status)).inc()
        self.seconds.labels(model).observe(seconds)

    def used(self, usage: dict[str, int]) -> None:
        for kind in ("prompt", "completion"):
            self.tokens.labels(kind).inc(usage[f"{kind}_tokens"])

    def text(self) -> bytes:
        return generate_latest(self.registry)
