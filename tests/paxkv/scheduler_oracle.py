"""The scheduler as one would write it without arrays: one request after another, over a plain-Python memory."""

import dataclasses

from tests.paxkv.oracles.common import NEVER, OK, Oracle


@dataclasses.dataclass
class Request:
    id: int
    prompt: int
    output: int
    arrival: int  # ticks
    tokens: list[int]  # what it will sample, one after another
    priority: int = 0
    predicted: int = 0
    deadline: int = 0
    adapter: int = 0
    delivered: int = 0  # tokens whose keys and values come with it
    row: int | None = None
    generated: int = 0
    reason: str = "NONE"
    admitted_at: int = -1
    first_token_at: int = -1
    ended_at: int = -1
    preemptions: int = 0
    recomputed_output: int = 0  # output tokens that a preemption threw out of memory

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def brings(self) -> int:
        """Of what it knows; the last token is computed, and after a preemption all of them."""
        return 0 if self.preemptions else min(self.delivered, self.known - 1)

    @property
    def ended(self) -> bool:
        return self.reason != "NONE"


@dataclasses.dataclass
class Step:
    """What happened; `new_tokens` and `starts` by request."""

    clock: int
    ticks: int = 0
    new_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    starts: dict[int, int] = dataclasses.field(default_factory=dict)
    samples: set[int] = dataclasses.field(default_factory=set)
    rows: dict[int, int] = dataclasses.field(default_factory=dict)  # row to request, while computing
    waiting: int = 0
    admitted: int = 0
    refused: int = 0
    hit_tokens: int = 0
    preempted: int = 0
    recompute_tokens: int = 0
    ended: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    pairs: int = 0  # of a query and a key that it sees
    usage: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()  # sync, background and unmap calls made in this step


class SchedulerOracle:
    """`ticks_of(tokens, kv_tokens, sync_map_calls, samples, pairs)` is how long a step takes that computes anything."""

    overtake = False

    def __init__(self, memory: Oracle, requests: list[Request], token_budget: int, stop_token: int, ticks_of):
        self.memory = memory
        self.requests = requests
        self.token_budget = token_budget
        self.stop_token = stop_token
        self.ticks_of = ticks_of
        self.clock = 0

    def step(self) -> Step:
        step = Step(self.clock)
        calls_before = self.memory.calls()
        self.compute(step)
        self.look(step)

        sync_calls = self.memory.calls()[0] - calls_before[0]
        samplers = [r for r in self.running() if r.id in step.new_tokens and self.length(r) == r.known]
        step.samples = {r.id for r in samplers}
        if step.new_tokens:
            tokens = sum(step.new_tokens.values())
            step.ticks = self.ticks_of(tokens, step.kv_tokens, sync_calls, len(samplers), step.pairs)
        else:
            step.ticks = self.time_to_next_arrival()
        self.clock += step.ticks
        for request in samplers:
            self.sample(request, step)
        self.memory.background()
        step.calls = tuple(after - before for before, after in zip(calls_before, self.memory.calls(), strict=True))
        return step

    def compute(self, step: Step) -> None:
        left = self.give_to_running(self.token_budget, step)
        if step.preempted == 0:
            self.admit(left, step)

    def running(self) -> list[Request]:
        return [r for r in self.requests if r.row is not None]

    def length(self, request: Request) -> int:
        return self.memory.length(request.row)

    def give_to_running(self, budget: int, step: Step) -> int:
        """Oldest first; whoever finds no room takes the memory of the youngest. Returns the budget that is left."""
        counts: dict[int, int] = {}  # by row
        for request in self.running():
            if request.row is None:  # preempted for an older one
                continue
            count = min(request.known - self.length(request), budget)
            while not self.has_room({**counts, request.row: count}):
                victim = self.running()[-1]
                self.preempt(victim, step)
                if victim is request:
                    break
            if request.row is not None:
                counts[request.row] = count
                budget -= count
                self.note(request, count, step)
        self.store(counts)
        return budget

    def has_room(self, counts: dict[int, int]) -> bool:
        demand = sum(self.memory.demand(row, self.memory.length(row) + count) for row, count in counts.items())
        return demand <= self.memory.available()

    def note(self, request: Request, count: int, step: Step) -> None:
        if count:
            step.starts[request.id] = self.length(request)
            step.new_tokens[request.id] = count
            step.pairs += sum(self.length(request) + place for place in range(1, count + 1))
            if request.known - self.length(request) > 1:
                step.prefill_tokens += count

    def store(self, counts: dict[int, int]) -> None:
        tokens = [counts.get(row, 0) for row in range(self.memory.rows)]
        assert self.memory.append(tokens, self.token_budget) == OK

    def preempt(self, request: Request, step: Step) -> None:
        step.preempted += 1
        step.recompute_tokens += self.length(request)
        request.preemptions += 1
        request.recomputed_output += request.generated
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        self.memory.release([row == request.row for row in range(self.memory.rows)])
        request.row = None

    def admit(self, budget: int, step: Step) -> None:
        """First come, first served, until one has to wait or the budget is spent."""
        counts: dict[int, int] = {}
        for request in self.in_order([r for r in self.requests if r.arrival <= self.clock]):
            if request.ended or request.row is not None:
                continue
            if budget == 0 or self.must_be_whole(request, budget):
                break
            if self.is_barred(request):
                if self.overtake:
                    continue
                break
            if request.output == 0:
                self.refuse(request, "NO_OUTPUT", step)
                continue
            if request.prompt >= self.memory.max_len:
                self.refuse(request, "REFUSED_TOO_LONG", step)
                continue
            final = min(request.prompt + request.output, self.memory.max_len) - 1  # the last token is never stored
            row, outcome = self.memory.admit(request.known, request.prompt, final, self.room(request))
            if outcome == NEVER:
                self.refuse(request, "REFUSED_NEVER_FITS", step)
                continue
            if outcome != OK:
                if self.overtake:
                    continue
                break
            request.row = row
            step.admitted += 1
            if request.admitted_at < 0:
                request.admitted_at = self.clock
            if request.brings:
                tokens = [request.brings if r == row else 0 for r in range(self.memory.rows)]
                assert self.memory.append(tokens, self.memory.max_len) == OK
                step.hit_tokens += request.brings
            counts[row] = min(request.known - request.brings, budget)
            budget -= counts[row]
            self.note(request, counts[row], step)
        self.store(counts)

    def in_order(self, requests: list[Request]) -> list[Request]:
        return requests

    def must_be_whole(self, request: Request, budget: int) -> bool:
        return False

    def is_barred(self, request: Request) -> bool:
        return False

    def room(self, request: Request) -> int | None:
        return None

    def refuse(self, request: Request, reason: str, step: Step) -> None:
        step.refused += 1
        request.reason = reason
        request.ended_at = self.clock

    def look(self, step: Step) -> None:
        """What can be seen while the model computes."""
        step.rows = {r.row: r.id for r in self.running()}
        step.kv_tokens = sum(self.length(r) for r in self.running() if r.id in step.new_tokens)
        step.waiting = sum(r.row is None and not r.ended and r.arrival <= self.clock for r in self.requests)
        stored_at_end = [0] * self.memory.rows
        for r in self.running():
            stored_at_end[r.row] = min(r.prompt + r.output, self.memory.max_len) - 1
        step.usage = self.memory.usage(stored_at_end)

    def sample(self, request: Request, step: Step) -> None:
        token = request.tokens[request.generated]
        request.generated += 1
        if request.generated == 1:
            request.first_token_at = self.clock
        if token == self.stop_token:
            request.reason = "STOP_TOKEN"
        elif request.generated == request.output:
            request.reason = "LENGTH"
        elif request.known == self.memory.max_len:
            request.reason = "MAX_MODEL_LEN"
        if request.ended:
            step.ended += 1
            request.ended_at = self.clock
            self.let_go(request)

    def time_to_next_arrival(self) -> int:
        to_come = [r.arrival for r in self.requests if r.arrival > self.clock]
        return min(to_come) - self.clock if to_come else 0


class PolicyOracle(SchedulerOracle):
    """The same under any policy: who is preempted may be anybody, so all shares are known before the first must go."""

    def __init__(self, memory: Oracle, requests: list[Request], token_budget: int, stop_token: int, ticks_of, policy):
        super().__init__(memory, requests, token_budget, stop_token, ticks_of)
        self.policy = policy
        self.victim = policy.victim
        self.overtake = policy.overtake
        self.share_with = self.everybody

    def everybody(self, request: Request) -> bool:
        return True

    def reads(self, request: Request) -> bool:
        return request.known - self.length(request) > 1

    def is_answered(self, request: Request) -> bool:
        return not self.reads(request)

    def compute(self, step: Step) -> None:
        if self.policy.first == "decode":
            super().compute(step)
            return
        self.share_with = self.reads
        super().compute(step)
        if not step.new_tokens:
            self.share_with = self.is_answered
            self.give_to_running(self.token_budget, step)

    def in_order(self, requests: list[Request]) -> list[Request]:
        return sorted(
            requests,
            key=lambda r: {
                "first_come": 0,
                "shortest": r.prompt + r.predicted,
                "priority": -r.priority,
                "deadline": r.deadline,
            }[self.policy.order],
        )

    def must_be_whole(self, request: Request, budget: int) -> bool:
        return not self.policy.chunked and budget < request.known - request.brings <= self.token_budget

    def is_barred(self, request: Request) -> bool:
        adapters = {r.adapter for r in self.running()}
        most = self.policy.max_adapters
        return most is not None and request.adapter not in adapters and len(adapters) >= most

    def room(self, request: Request) -> int | None:
        if not self.policy.reserve_output:
            return None
        return max(request.known, min(request.prompt + request.predicted, self.memory.max_len) - 1)

    def worth(self, request: Request) -> int:
        return {"last_arrived": 0, "least_work": self.length(request), "priority": request.priority}[self.victim]

    def give_to_running(self, budget: int, step: Step) -> int:
        shares: dict[int, int] = {}  # by request
        for request in sorted(self.running(), key=lambda r: (r.known - self.length(r) > 1, r.id)):
            wanted = request.known - self.length(request) if self.share_with(request) else 0
            shares[request.id] = min(wanted, budget)
            budget -= shares[request.id]
        while not self.has_room({r.row: shares[r.id] for r in self.running()}):
            self.preempt(min(self.running(), key=lambda r: (self.worth(r), -r.id)), step)
        for request in self.running():
            self.note(request, shares[request.id], step)
        self.store({r.row: shares[r.id] for r in self.running()})
        return budget
