"""The optimizers in float64 NumPy, written from the papers' formulas.

A parameter is an array, its state a dict; `step` counts from 1. Nothing here
uses TensorFlow or the package.
"""

import numpy as np


def moments(state, g, beta_1, beta_2):
    """Update m and v by g; return m / (1 - beta_1^t), v / (1 - beta_2^t)."""
    state["t"] = state.get("t", 0) + 1
    state["m"] = beta_1 * state.get("m", 0.0) + (1 - beta_1) * g
    state["v"] = beta_2 * state.get("v", 0.0) + (1 - beta_2) * g**2
    return (
        state["m"] / (1 - beta_1 ** state["t"]),
        state["v"] / (1 - beta_2 ** state["t"]),
    )


def trust_ratio(w, u, adapt, lower_bound, upper_bound):
    if not adapt:
        return 1.0
    w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(u)
    if lower_bound is not None:
        w_norm = max(w_norm, lower_bound)
    if upper_bound is not None:
        w_norm = min(w_norm, upper_bound)
    return w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0


def lamb(
    w,
    g,
    state,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    weight_decay=0.01,
    adapt=True,
    lower_bound=None,
    upper_bound=None,
):
    """Return w after one step of arXiv:1904.00962, Algorithm 2."""
    m_hat, v_hat = moments(state, g, beta_1, beta_2)
    u = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * w
    return w - lr * trust_ratio(w, u, adapt, lower_bound, upper_bound) * u


def lans(
    w,
    g,
    state,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-6,
    weight_decay=0.0,
    adapt=True,
    lower_bound=None,
    upper_bound=None,
    clip=None,
):
    """Return w after one step of arXiv:2006.13484, Algorithm 2."""
    norm = np.linalg.norm(g)
    g = g / norm if norm > 0 else np.zeros_like(g)
    if clip is not None:
        g = np.clip(g, -clip, clip)
    m_hat, v_hat = moments(state, g, beta_1, beta_2)
    d = np.sqrt(v_hat) + epsilon
    a = m_hat / d + weight_decay * w
    c = g / d + weight_decay * w
    bounds = (adapt, lower_bound, upper_bound)
    step_a = beta_1 * trust_ratio(w, a, *bounds) * a
    step_c = (1 - beta_1) * trust_ratio(w, c, *bounds) * c
    return w - lr * (step_a + step_c)


def adam_offload(
    w,
    g,
    state,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-8,
    nesterov=False,
    weight_decay=0.0,
    adapt=True,
):
    """Return w after one step of MindSpore's AdamOffload."""
    del adapt  # There is no trust ratio.
    g = g + weight_decay * w
    moments(state, g, beta_1, beta_2)
    m, v, t = state["m"], state["v"], state["t"]
    rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    if nesterov:
        m = beta_1 * m + (1 - beta_1) * g
    return w - rate * m / (np.sqrt(v) + epsilon)


def clip_by_norm(g, limit):
    norm = np.linalg.norm(g)
    return g * (limit / norm) if norm > limit else g


def clip_by_global_norm(gradients, limit):
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
    return [g * limit / max(norm, limit) for g in gradients]


def sgd(w, g, state, lr):
    """Return w after one step without momentum."""
    del state
    return w - lr * g


def adam(w, g, state, lr, epsilon=1e-7, weight_decay=0.0):
    """Return w after one step of Adam with decoupled decay, as Keras has it."""
    w = w - lr * weight_decay * w
    moments(state, g, 0.9, 0.999)
    correction = np.sqrt(1 - 0.999 ** state["t"]) / (1 - 0.9 ** state["t"])
    return w - lr * correction * state["m"] / (np.sqrt(state["v"]) + epsilon)


def momentum_sgd(w, g, state, lr, momentum=0.9, rate_in_momentum=True):
    """Return w after one step, with the rate in the momentum or outside."""
    inside, outside = (lr, 1.0) if rate_in_momentum else (1.0, lr)
    state["u"] = momentum * state.get("u", 0.0) + inside * g
    return w - outside * state["u"]


class DGC:
    """Deep Gradient Compression (arXiv:1712.01887) of one parameter.

    Each of N workers has the gradient of its share of the mean loss, so that
    the sum is the mean. `sparsity(step)` is None while the exchange is dense.
    `lr` may be set between steps.
    """

    def __init__(
        self,
        w,
        workers,
        lr,
        momentum=0.9,
        nesterov=False,
        masking=True,
        clipnorm=None,
        penalty=lambda w: 0.0,
        sparsity=lambda step: 0.75,
        compressed=True,
        rate_in_momentum=True,
    ):
        self.rate_in_momentum = rate_in_momentum
        self.w, self.lr, self.momentum = w.astype("float64"), lr, momentum
        self.nesterov, self.masking, self.compressed = (
            nesterov,
            masking,
            compressed,
        )
        self.clipnorm, self.penalty, self.sparsity = clipnorm, penalty, sparsity
        self.u = np.zeros((workers, *w.shape))
        self.v = np.zeros((workers, *w.shape))
        self.steps = 0

    def accumulate(self, worker, g):
        """Add the gradient to the momentum; return the increment of v."""
        g = g * (self.lr if self.rate_in_momentum else 1.0)
        if self.nesterov:
            self.u[worker] = self.momentum * (self.u[worker] + g)
            return self.u[worker] + g
        self.u[worker] = self.momentum * self.u[worker] + g
        return self.u[worker]

    def step(self, gradients):
        """Take a step from a list of the workers' gradients."""
        workers = len(gradients)
        share = self.penalty(self.w) / workers
        sparsity = self.sparsity(self.steps) if self.compressed else None
        self.steps += 1
        total = np.zeros_like(self.w)
        if sparsity is None:
            mean = sum(gradients)
            if self.clipnorm:
                mean = clip_by_norm(mean, self.clipnorm)
            for i in range(workers):
                total = total + self.accumulate(i, mean / workers + share)
        else:
            k = max(1, int(round(self.w.size * (1 - sparsity), 6)))
            for i, g in enumerate(gradients):
                if self.clipnorm:
                    g = clip_by_norm(g, self.clipnorm / np.sqrt(workers))
                self.v[i] += self.accumulate(i, g + share)
                v, u = self.v[i].reshape(-1), self.u[i].reshape(-1)
                sent = np.argsort(-np.abs(v), kind="stable")[:k]
                sent = sent[v[sent] != 0]
                total.reshape(-1)[sent] += v[sent]
                v[sent] = 0
                if self.masking:
                    u[sent] = 0
            if sparsity == 0 and not self.masking:
                self.u[:] = self.u.mean(axis=0)
        self.w = self.w - (1 if self.rate_in_momentum else self.lr) * total


class SparseLoCo:
    """SparseLoCo (arXiv:2508.15706) of one parameter.

    `inner(w, g, state, lr)` is a step of the inner optimizer; a round has
    `every` steps. `sparsity(step)` applies at the step that ends a round.
    All else is as in `DGC`.
    """

    def __init__(
        self,
        w,
        workers,
        inner,
        lr,
        sparsity=lambda step: 0.75,
        decay=1.0,
        outer_lr=1.0,
        compressed=True,
        every=1,
        overlap=False,
        ahead=0.0,
    ):
        self.w, self.inner, self.lr = w.astype("float64"), inner, lr
        self.sparsity, self.decay, self.outer_lr = sparsity, decay, outer_lr
        self.compressed, self.every = compressed, every
        self.overlap, self.travelling = overlap, np.zeros_like(self.w)
        self.ahead = ahead
        self.local = self.base = [self.w] * workers
        self.states = [{} for _ in range(workers)]
        self.v = np.zeros((workers, *w.shape))
        self.steps = self.taken = 0

    def step(self, gradients):
        """Take a step from a list of the workers' gradients."""
        workers = len(gradients)
        if self.taken == 0 and self.ahead:
            self.local = self.base = [
                self.w - self.ahead * workers * v for v in self.v
            ]
        self.local = [
            self.inner(w, workers * g, state, self.lr)
            for w, g, state in zip(
                self.local, gradients, self.states, strict=True
            )
        ]
        self.taken += 1
        if self.taken == self.every:
            (self.go_on if self.overlap else self.synchronize)()
        self.steps += 1

    def synchronize(self):
        """End the round."""
        self.arrive()
        self.accumulate()
        self.w = self.w - self.outer_lr * self.send()
        self.local = self.base = [self.w] * len(self.local)
        self.taken = 0

    def go_on(self):
        """End the round; sent entries arrive at the end of the next round."""
        self.arrive()
        self.accumulate()
        self.local = self.base = [self.w - len(self.v) * v for v in self.v]
        self.travelling, self.taken = self.outer_lr * self.send(), 0

    def arrive(self):
        """Receive the entries that were sent at the last end of a round."""
        self.w = self.w - self.travelling
        self.travelling = np.zeros_like(self.w)

    def accumulate(self):
        """Add the movement of the round's local steps to v."""
        for i, (base, local) in enumerate(
            zip(self.base, self.local, strict=True)
        ):
            self.v[i] = self.decay * self.v[i] + (base - local) / len(self.v)

    def send(self):
        """Return the sum of the largest entries, and remove them from v."""
        sparsity = self.sparsity(self.steps) if self.compressed else None
        total = np.zeros_like(self.w)
        for held in self.v:
            k = held.size
            if sparsity is not None:
                k = max(1, int(round(held.size * (1 - sparsity), 6)))
            v = held.reshape(-1)
            sent = np.argsort(-np.abs(v), kind="stable")[:k]
            total.reshape(-1)[sent] += v[sent]
            v[sent] = 0
        return total


class ShardedDGC:
    """DGC of several parameters whose entries are summed by shards.

    It works as `DGC` with masking, but entries beyond a shard's capacity, and
    sums that a shard does not send on, stay in v and u. There are `residuals`
    residuals, each with its own gradients.
    """

    def __init__(
        self, ws, residuals, shards, capacity, lr, sparsity, momentum=0.9
    ):
        self.ws = [w.astype("float64") for w in ws]
        self.shards, self.capacity, self.lr = shards, capacity, lr
        self.sparsity, self.momentum = sparsity, momentum
        self.us, self.vs = (
            [[np.zeros(w.shape) for w in ws] for _ in range(residuals)]
            for _ in range(2)
        )

    def shard(self, t, position):
        groups = [-(-w.size // self.shards) for w in self.ws[:t]]
        group = position // self.shards + sum(groups)
        return (position + group * 2654435761 // 65536 % 65536) % self.shards

    def step(self, gradients):
        """Step with gradients[residual][parameter]."""
        ks = [
            max(1, round(w.size * (1 - self.sparsity), 6).__floor__())
            for w in self.ws
        ]
        given, sums = [], [{} for _ in range(self.shards)]
        for m, gs in enumerate(gradients):
            rows = [[] for _ in range(self.shards)]
            for t, g in enumerate(gs):
                self.us[m][t] = self.momentum * self.us[m][t] + g
                self.vs[m][t] += self.us[m][t]
                v = self.vs[m][t].reshape(-1)
                for p in np.argsort(-np.abs(v))[: ks[t]]:
                    rows[self.shard(t, p)].append((abs(v[p]), t, p))
            for shard, entries in enumerate(rows):
                for _, t, p in sorted(entries)[::-1][: self.capacity]:
                    given.append((m, t, p))
                    value = self.vs[m][t].reshape(-1)[p]
                    sums[shard][t, p] = sums[shard].get((t, p), 0.0) + value
        kept = {}
        for shard in sums:
            for t, k in enumerate(ks):
                own = [(abs(s), p, s) for (u, p), s in shard.items() if u == t]
                for _, p, s in sorted(own)[::-1][: -(-k // self.shards)]:
                    kept[t, p] = s
        for (t, p), s in kept.items():
            self.ws[t].reshape(-1)[p] -= self.lr * s
        for m, t, p in given:
            if (t, p) in kept:
                self.us[m][t].reshape(-1)[p] = 0
                self.vs[m][t].reshape(-1)[p] = 0
