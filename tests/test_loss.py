"""Losses over a split vocabulary against float64 on 1 to 4 ranks; what they hold, send, refuse and ignore."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ringattn import cross_entropy, linear_cross_entropy, loss_ops
from ringattn.comm import group_name
from ringattn.draw import Ranks
from ringattn.launch.spawn import run
from ringattn.loss_ops import Options, run_cross_entropy, run_linear_cross_entropy, run_linear_cross_entropy_backward
from ringattn.testing import gate

TOKENS, VOCAB, HIDDEN = 37, 53, 16
WORLDS = (1, 2, 3, 4)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "sum"},
    {"reduction": "none", "label_smoothing": 1.0},
    {"num_items": 90},
]


def make_case(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (T, H), weight (V, H) and targets (T,), on every part of the vocabulary and some ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (scale * torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype)
    targets = (torch.arange(TOKENS) * 10 + 2) % VOCAB
    targets[[0, 1, 2]] = torch.tensor([0, VOCAB - 1, 17])
    targets[[5, 11, 36]] = -100
    return hidden, weight, targets


def edges(kind: str) -> list[int]:
    """Ends of the slices: almost equal, ever larger, or all on the last rank but one."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "even": [VOCAB * r // world for r in range(world + 1)],
        "uneven": [round(VOCAB * (r / world) ** 2) for r in range(world + 1)],
        "empty": [0] * max(world - 1, 1) + [VOCAB] * (world + 1 - max(world - 1, 1)),
    }[kind]


GRID = [("uneven", options) for options in OPTIONS] + [("even", OPTIONS[1]), ("empty", OPTIONS[1]), ("empty", {})]


def mine(kind: str) -> slice:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return slice(*edges(kind)[rank : rank + 2])


def oracle(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The same loss from the whole logits, by torch's own function, in their dtype."""
    reduction, items, z_loss = (
        options.pop("reduction", "mean"),
        options.pop("num_items", None),
        options.pop("z_loss", 0),
    )
    losses = F.cross_entropy(logits, targets, reduction="none", **options)
    valid = targets != -100
    losses = losses + torch.where(valid, z_loss * torch.logsumexp(logits, dim=1) ** 2, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" else items or valid.sum())


def with_gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The loss and the gradients of its inputs, each row weighted differently where there are rows."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    weights = torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).reshape(value.shape)
    return [value.detach(), *torch.autograd.grad(value, leaves, weights)]


def passes(got: list[Tensor], single: list[Tensor], exact: list[Tensor], *what: Any) -> None:
    for name, x, x1, x64 in zip(("loss", "first gradient", "weight gradient"), got, single, exact, strict=False):
        verdict = gate(x, x1, x64)
        assert verdict.ok, (name, verdict, *what)


def check_logits(dtype: torch.dtype) -> None:
    hidden, weight, targets = make_case(dtype)
    logits = (4 * hidden.float() @ weight.float().T).to(dtype)
    alone = alone_group()
    for kind, options in GRID:
        cut = mine(kind)
        exact = with_gradients(lambda x, o=options: oracle(x, targets, **o), logits.double())
        single = with_gradients(lambda x, o=options: cross_entropy(x, targets, group=alone, **o), logits)
        start = {} if kind == "even" else {"vocab_start": cut.start, "vocab_size": VOCAB}
        for chunk in (None, 5) if options else (5,):
            given = options | start | {"chunk": chunk}
            got = with_gradients(lambda x, o=given: cross_entropy(x, targets, **o), logits[:, cut])
            assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            single_cut, exact_cut = ([loss, grad[:, cut]] for loss, grad in (single, exact))
            passes(got, single_cut, exact_cut, kind, options)
            assert not got[1][targets == -100].any()


def check_linear(dtype: torch.dtype) -> None:
    hidden, weight, targets = make_case(dtype)
    alone = alone_group()
    for kind, options in GRID:
        cut = mine(kind)
        exact = with_gradients(lambda h, w, o=options: oracle(h @ w.T, targets, **o), hidden.double(), weight.double())
        single = with_gradients(
            lambda h, w, o=options: linear_cross_entropy(h, w, targets, group=alone, **o), hidden, weight
        )
        for chunk in (None, 5):
            got = with_gradients(
                lambda h, w, o=options, c=chunk: linear_cross_entropy(h, w, targets, chunk=c, **o), hidden, weight[cut]
            )
            single_cut, exact_cut = ([loss, dh, dw[cut]] for loss, dh, dw in (single, exact))
            passes(got, single_cut, exact_cut, kind, options)
            same_on_all_ranks(got[0])
            same_on_all_ranks(got[1])


_alone: list[Any] = []


def alone_group() -> Any:
    """A group of this rank alone."""
    if not dist.is_initialized():
        return None
    if not _alone:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _alone.append(groups[dist.get_rank()])
    return _alone[0]


def same_on_all_ranks(x: Tensor) -> None:
    if dist.is_initialized():
        others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(others, x.contiguous())
        assert all(torch.equal(x, other) for other in others)


def check_padding() -> None:
    hidden, weight, targets = make_case(torch.float64)
    targets[targets >= 40] = 7
    cut = mine("even")
    expected = with_gradients(lambda h, w: oracle(h @ w.T, targets, label_smoothing=0.1), hidden, weight[:40])
    poisoned = weight.clone()
    poisoned[40:] = torch.nan
    got = with_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets, vocab_size=40, label_smoothing=0.1), hidden, poisoned[cut]
    )
    whole = F.pad(expected[2], (0, 0, 0, VOCAB - 40))
    for x, y in zip(got, (*expected[:2], whole[cut]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def check_ignored_rows() -> None:
    hidden, weight, targets = make_case(torch.float32)
    weight = weight[mine("uneven")]
    hidden[targets == -100] = torch.nan
    for x in with_gradients(lambda h, w: linear_cross_entropy(h, w, targets, label_smoothing=0.1), hidden, weight):
        assert x.isfinite().all()
    none = torch.full_like(targets, -100)
    for reduction in ("mean", "sum", "none"):
        for loss in (
            lambda h, w, r=reduction: linear_cross_entropy(h, w, none, reduction=r),
            lambda h, w, r=reduction: cross_entropy(h @ w.T, none, reduction=r),
        ):
            assert not loss(hidden, weight).any()
        dhidden, dweight = with_gradients(lambda h, w, r=reduction: linear_cross_entropy(h, w, none, reduction=r),
                                          hidden, weight)[1:]  # fmt: skip
        assert not dhidden.any() and not dweight.any()
    first = targets.masked_fill(targets == -100, 0)
    losses = linear_cross_entropy(torch.nan_to_num(hidden), weight, first, ignore_index=0, reduction="none")
    assert not losses[first == 0].any() and losses[first != 0].all()


def check_shapes() -> None:
    hidden, weight, targets = make_case(torch.float64)
    cut = mine("even")
    logits, batch = (hidden @ weight.T)[:36], targets[:36].view(2, 18)
    expected = oracle(logits, targets[:36], reduction="none").view(2, 18)
    strided = logits.T.contiguous().T[:, cut].view(2, 18, -1)
    torch.testing.assert_close(cross_entropy(strided, batch.int(), reduction="none"), expected)
    got = linear_cross_entropy(hidden[:36].view(2, 18, HIDDEN), weight[cut], batch, reduction="none")
    torch.testing.assert_close(got, expected)
    empty = linear_cross_entropy(hidden[:0].requires_grad_(), weight[cut], targets[:0])
    empty.backward()
    assert empty == 0 and cross_entropy(logits[0, cut], targets[0]).dim() == 0


def check_extreme_logits() -> None:
    targets = torch.arange(4) * 13
    for value in (0.0, 3e4, -3e4, 1e38):  # at 3e4 the float32 log-sum-exp itself is off by 1e-3
        x = torch.full((4, VOCAB), value)
        x[1] = -torch.inf
        x[1, 13] = value
        got = with_gradients(lambda x: cross_entropy(x, targets, reduction="none"), x[:, mine("uneven")])
        expected = with_gradients(lambda x: F.cross_entropy(x, targets, reduction="none"), x.double())
        expected[1] = expected[1][:, mine("uneven")]
        for ours, exact in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-7)


def check_messages() -> None:
    """One gather of 12 or 16 bytes a row forward; backward one sum of the hidden states' gradient."""
    hidden, weight, targets = make_case(torch.float32)
    made: list[Ranks] = []

    class Recording(Ranks):
        def __init__(self, comm: Any) -> None:
            super().__init__(comm)
            made.append(self)

    loss_ops.Ranks = Recording  # type: ignore[misc]
    try:
        for smooth, words in ((0.0, 3), (0.1, 4)):
            made.clear()
            h = hidden.clone().requires_grad_()
            linear_cross_entropy(h, weight[mine("even")], targets, label_smoothing=smooth, chunk=4).backward()
            sent = [(ranks.messages, ranks.sent_bytes) for ranks in made]
            many = dist.get_world_size() > 1
            assert sent == ([(1, 4 * words * TOKENS), (1, 4 * TOKENS * HIDDEN)] if many else [(0, 0)])
            frozen = weight[mine("even")].clone().requires_grad_()
            made.clear()
            linear_cross_entropy(hidden, frozen, targets).backward()
            assert len(made) == 1  # nothing is summed for hidden states without a gradient
    finally:
        loss_ops.Ranks = Ranks  # type: ignore[misc]


def check_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, logits = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 2), (5, 2), (3, 5))
    )
    targets = torch.tensor([4, -100, 1])
    cut = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    h = hidden.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h: linear_cross_entropy(h, weight[cut], targets, label_smoothing=0.1, z_loss=0.1, chunk=2), h
    )
    # A slice is moved by all ranks at once, so that every call is one of the whole vocabulary: sum over ranks of loss.
    for make in (
        lambda x: cross_entropy(x[:, cut], targets, label_smoothing=0.1, z_loss=0.1),
        lambda x: linear_cross_entropy(hidden.detach(), (x.T @ x)[cut, :2], targets, z_loss=0.1),
    ):
        x = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(make(x), x)
        dist.all_reduce(grad)
        for place in itertools.product(range(3), range(5)):
            step = torch.zeros_like(logits)
            step[place] = 1e-6
            with torch.no_grad():
                slope = (make(logits + step) - make(logits - step)) / 2e-6
            torch.testing.assert_close(grad[place], slope, rtol=1e-6, atol=1e-8)


def check_compiled() -> None:
    hidden, weight, targets = make_case(torch.float32)
    weight = weight[mine("uneven")]

    def both(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, z_loss=1e-3) + cross_entropy(h @ w.T, targets, label_smoothing=0.1)

    eager = with_gradients(both, hidden, weight)
    compiled = with_gradients(torch.compile(both, fullgraph=True, backend="aot_eager"), hidden, weight)
    assert all(torch.equal(x, y) for x, y in zip(eager, compiled, strict=True))


def check_opcheck() -> None:
    hidden, weight, targets = make_case(torch.float32)
    name = group_name(None)
    options = Options(-1, -1, -100, 0.1, 0.01, name, "", 8, True)
    w = weight[mine("even")].requires_grad_()
    torch.library.opcheck(run_linear_cross_entropy, (hidden.requires_grad_(), w, targets, *options))
    logits = (hidden @ w.T).detach().requires_grad_()
    torch.library.opcheck(run_cross_entropy, (logits, targets, *options._replace(needs_hidden=False)))


def check_errors() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets = make_case(torch.float32)
    cut = mine("even")
    logits = (hidden @ weight.T)[:, cut]
    last = rank == world - 1
    wrong, negative = targets.clone(), targets.clone()
    wrong[9], negative[4] = VOCAB, -1
    place = {"vocab_start": cut.start, "vocab_size": VOCAB}
    for call, message in (
        (lambda: cross_entropy(logits, wrong), rf"targets must lie in \[0, {VOCAB}\).* got {VOCAB} in row 9"),
        (lambda: linear_cross_entropy(hidden, weight[cut], negative), "got -1 in row 4"),
        (lambda: cross_entropy(logits, targets, **place | {"vocab_start": cut.start + last}), "leaves a gap after"),
        (lambda: cross_entropy(logits, targets, **place | {"vocab_start": cut.start - last}), "overlaps"),
        (lambda: cross_entropy(logits, targets, vocab_size=VOCAB + 1), f"fewer than vocab_size={VOCAB + 1}"),
        (lambda: linear_cross_entropy(hidden[:, : HIDDEN - last], weight[cut], targets), "takes hidden states of size"),
        (
            lambda: linear_cross_entropy(hidden[:, : HIDDEN - last], weight[cut, : HIDDEN - last], targets),
            "hidden size: rank 0 has 16",
        ),
        (lambda: cross_entropy(logits, targets, z_loss=0.1 * last), "ranks disagree on z_loss"),
        (lambda: cross_entropy(logits, targets, reduction="avg" if last else "mean"), "unknown reduction 'avg'"),
        (lambda: cross_entropy(logits, targets, reduction="sum" if last else "mean"), "ranks disagree on reduction"),
        (lambda: cross_entropy(logits, targets.roll(int(last))), "ranks disagree on sum of the targets"),
        (
            lambda: linear_cross_entropy(hidden.clone().requires_grad_(last), weight[cut], targets),
            "ranks disagree on needs_hidden",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert cross_entropy(logits, targets).isfinite()  # the group is still good


def check_sub_group() -> None:
    hidden, weight, targets = make_case(torch.float64)
    pair = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        part = weight.tensor_split(2)[dist.get_rank() // 2]
        got = linear_cross_entropy(hidden, part, targets, group=pair)
        torch.testing.assert_close(got, oracle(hidden @ weight.T, targets))


def check_all() -> None:
    world = dist.get_world_size()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_logits(dtype)
        check_linear(dtype)
    for check in (check_padding, check_ignored_rows, check_shapes, check_extreme_logits, check_messages):
        check()
    if world > 1:
        check_errors()
    if world == 2:
        check_gradcheck()
        check_opcheck()
    if world == 3:
        check_compiled()
    if world == 4:
        check_sub_group()


@pytest.mark.parametrize("world", WORLDS)
def test_on_ranks(world: int) -> None:
    run(check_all, world, timeout=150)  # one start of the ranks for all checks


@pytest.mark.parametrize(
    "check", [check_padding, check_ignored_rows, check_shapes, check_extreme_logits, check_opcheck]
)
def test_in_one_process(check: Callable[[], None]) -> None:
    check()


class Live(TorchDispatchMode):
    """The most elements that results of operations held at one time, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors, self.peak = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.tensors[x] = None
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() // 4 for x in self.tensors}
        self.peak = max(self.peak, sum(storages.values()))
        return out


@pytest.mark.parametrize("chunk", [16, 256])
def test_linear_form_never_holds_the_logits(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, vocab, dim = 256, 512, 8
    hidden, weight = (torch.randn(n, dim, generator=generator) for n in (tokens, vocab))
    targets = torch.randint(vocab, (tokens,), generator=generator)
    options = Options(-1, -1, -100, 0.1, 0.1, "", "", chunk)
    with Live() as live:  # within the ops, which are opaque from outside
        _, lse, place = run_linear_cross_entropy._init_fn(hidden, weight, targets, *options)
        grad = torch.ones(tokens)
        run_linear_cross_entropy_backward._init_fn(grad, hidden, weight, targets, lse, place, True, True, *options)
    bound = 3 * chunk * vocab + 4 * (tokens + vocab) * dim + 40 * tokens
    assert live.peak <= bound
    assert (live.peak < tokens * vocab) == (chunk == 16)  # and one chunk of all rows is seen


def test_a_target_that_is_not_looked_for_makes_its_row_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_ops, "_check_targets", lambda *_: None)
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 7, -100]), reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isnan().tolist() == [False, True, False] and grad.isnan().any(1).tolist() == [False, True, False]


def test_autocast_multiplies_in_its_dtype_once() -> None:
    hidden, weight, targets = make_case(torch.float32)
    expected = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight.bfloat16(), targets), expected)


def test_16_bit_products_are_not_rounded() -> None:
    hidden, weight, targets = make_case(torch.bfloat16)
    exact = with_gradients(lambda h, w: oracle(h @ w.T, targets), hidden.double(), weight.double())
    torch_own = with_gradients(lambda h, w: oracle((h @ w.T).float(), targets), hidden, weight)
    got = with_gradients(lambda h, w: linear_cross_entropy(h, w, targets), hidden, weight)
    for x, theirs, x64 in zip(got, torch_own, exact, strict=True):
        assert (x - x64).norm() < (theirs - x64).norm()


# What each guarantee rests on, broken on purpose.


def _local_mean(stats: Tensor, targets: Tensor, place: Any, options: Any) -> Any:
    return REAL_LOSSES(stats, targets, place._replace(total=place.width + 9), options)


REAL_LOSSES, REAL_OWNED = loss_ops._losses, loss_ops._owned
MUTATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "smoothing over another vocabulary": ("_losses", _local_mean),
    "every target is here": ("_owned", lambda t, p: (torch.ones_like(t, dtype=torch.bool), REAL_OWNED(t, p)[1])),
    "no shift by the global maximum": ("finite_shift", torch.zeros_like),
}


def test_a_mutation_fails_the_checks() -> None:
    for mutation in MUTATIONS:
        assert all(run(is_wrong, 2, mutation, timeout=60).values()), mutation


def is_wrong(mutation: str) -> bool:
    """Whether the loss is wrong."""
    name, broken = MUTATIONS[mutation]
    setattr(loss_ops, name, broken)
    hidden, weight, targets = make_case(torch.float64, scale=100.0)
    logits = hidden @ weight.T
    got = cross_entropy(logits[:, mine("even")], targets, label_smoothing=0.1)
    return not torch.allclose(got, oracle(logits, targets, label_smoothing=0.1), rtol=1e-10, atol=0)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"targets": torch.zeros(4)}, "targets must be an int64 or int32 tensor"),
    ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets must be \(4,\) on cpu for \(4, 6\)"),
    ({"targets": torch.full((4,), 6)}, r"targets must lie in \[0, 6\)"),
    ({"logits": torch.zeros(4, 6, dtype=torch.int64)}, "logits must be a tensor of at least one dimension"),
    ({"vocab_start": 1}, "one process holds the tokens from 1 to 7 and no group holds the others"),
    ({"vocab_size": 7}, "the vocabulary starts at 0 and has 7"),
    ({"vocab_size": 0}, "vocab_size must be an int in"),
    ({"label_smoothing": 1.5}, "label_smoothing must be a number in"),
    ({"label_smoothing": torch.nan}, "label_smoothing must be a number in"),
    ({"z_loss": -1.0}, "z_loss must be a number in"),
    ({"reduction": "avg"}, "unknown reduction 'avg'; choose one of mean, sum, none"),
    ({"validate": "never"}, "unknown validate 'never'"),
    ({"ignore_index": 1.0}, "ignore_index must be an int"),
    ({"num_items": 2.5}, "num_items must be an int"),
    ({"chunk": 0}, "chunk must be an int in"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_values_are_named(given: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(4, 6), "targets": torch.zeros(4, dtype=torch.int64)} | given
    with pytest.raises(ValueError, match=message):
        cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(6, 4), "takes hidden states of size 4, got 3"),
        (torch.zeros(6), r"weight_shard must be a plain tensor \(V_local, H\)"),
        (torch.zeros(6, 3, dtype=torch.float64), "must have one dtype"),
    ],
)
def test_bad_weights_are_named(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(torch.zeros(4, 3), weight, torch.zeros(4, dtype=torch.int64))
