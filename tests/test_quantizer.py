"""The quantizer against its peers (vector-quantize-pytorch, scikit-learn), against plain loops, and at the edges."""

import subprocess
import sys

import pytest
import torch
from sklearn.cluster import KMeans
from vector_quantize_pytorch import ResidualVQ
from vector_quantize_pytorch.vector_quantize_pytorch import rotate_to

from gti_nb import quantizer as module
from gti_nb.quantizer import (ResidualQuantizer, diversity_loss, kmeans, nearest, rotate, sinkhorn, squared_distances,
                              straight_through)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the residual quantizer and vector-quantize-pytorch's ----------------------------------------------------------------

def pair(levels: int, k: int, d: int, seed: int, **settings):
    "Our quantizer and theirs with the same codebooks and the same statistics."
    torch.manual_seed(seed)
    ours = ResidualQuantizer(levels, k, d)
    theirs = ResidualVQ(dim=d, num_quantizers=levels, codebook_size=k, rotation_trick=False, threshold_ema_dead_code=0,
                        **settings)
    for layer, codebook in zip(theirs.layers, ours.codebooks.detach()):
        layer._codebook.embed.copy_(codebook[None])
        layer._codebook.embed_avg.copy_(codebook[None])
    return ours, theirs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels, k, d, n", [(1, 2, 1, 50), (3, 16, 8, 500), (4, 64, 32, 300), (2, 100, 3, 7)])
def test_codes_and_vectors_agree(levels, k, d, n, seed):
    ours, theirs = pair(levels, k, d, seed)
    z = torch.randn(n, d) * 2
    found = ours.eval()(z)
    vectors, codes, _ = theirs.eval()(z)
    assert torch.equal(found.codes, codes)
    torch.testing.assert_close(found.vectors, vectors, rtol=0, atol=1e-5)
    for level, rest in enumerate(found.residuals):
        torch.testing.assert_close(rest, z - theirs.get_codes_from_indices(codes)[:level].sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_moving_averages_agree(eps):
    """Theirs divides by the mass after Laplace smoothing with `eps`, (mass + eps) / (total + K eps) * total; ours by the mass
    itself. Without smoothing the codebooks are equal; with it they differ by exactly that factor."""
    ours, theirs = pair(3, 8, 4, seed=0, decay=0.9, eps=eps)
    for step in range(5):
        z = torch.randn(400, 4)
        before = ours.codebooks.detach().clone()
        found = ours(z)
        ours.average(found, decay=0.9)
        _, codes, _ = theirs.train()(z)
        assert torch.equal(found.codes, codes)
        assert not torch.allclose(ours.codebooks, before, atol=1e-3)
        for level, layer in enumerate(theirs.layers):
            mass = layer._codebook.cluster_size[0]
            torch.testing.assert_close(ours.mass[level], mass)
            torch.testing.assert_close(ours.sums[level], layer._codebook.embed_avg[0], rtol=1e-4, atol=1e-4)
            smoothed = (mass + eps) / (mass.sum() + 8 * eps) * mass.sum()
            expected = layer._codebook.embed[0] * (smoothed / mass)[:, None]
            torch.testing.assert_close(ours.codebooks[level].detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n, d, seed", [(1, 2, 0), (100, 8, 1), (50, 384, 2)])
def test_rotation_agrees(n, d, seed):
    z, quantized = torch.randn(n, d, generator=seeded(seed)), torch.randn(n, d, generator=seeded(seed + 10))
    upstream = torch.randn(n, d, generator=seeded(seed + 20))
    gradients, values = [], []
    for turn in (rotate, rotate_to):
        leaf = z.clone().requires_grad_()
        values.append(turn(leaf, quantized))
        values[-1].backward(upstream)
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)
    assert torch.equal(values[0], quantized)
    assert not torch.allclose(gradients[0], upstream, atol=0.1)  # what straight-through would give


@pytest.mark.parametrize("through", [straight_through, rotate])
def test_forward_is_exact_and_gradients_are_finite_at_the_edges(through):
    z = torch.stack([torch.zeros(3), torch.full((3,), 1e-30), torch.tensor([1.0, 0, 0]), torch.tensor([1e6, 1e-6, 0])])
    quantized = torch.stack([torch.ones(3), torch.ones(3), torch.tensor([-1.0, 0, 0]), torch.tensor([1e-3, 0.1, 7])])
    z, quantized = z.requires_grad_(), quantized.requires_grad_()
    out = through(z, quantized)
    out.sum().backward()
    assert torch.equal(out, quantized)
    assert z.grad.isfinite().all() and quantized.grad is None
    assert torch.equal(z.grad[:2], torch.ones(2, 3))


def test_every_level_reaches_the_encoder_and_only_its_own_codebook():
    torch.manual_seed(0)
    quantizer, z = ResidualQuantizer(4, 8, 5), torch.randn(64, 5, requires_grad=True)
    found = quantizer(z)
    leaves = [z, quantizer.codebooks]
    for level in range(4):
        to_z, to_codes = torch.autograd.grad(found.commitment_loss[level], leaves, retain_graph=True, allow_unused=True)
        assert to_z.norm() > 1e-3 and to_codes is None
        to_z, to_codes = torch.autograd.grad(found.codebook_loss[level], leaves, retain_graph=True, allow_unused=True)
        assert to_z is None
        assert (to_codes.abs().sum((1, 2)) > 0).tolist() == [other == level for other in range(4)]


# --- nearest and k-means ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("room", [1, 50, 1000])
def test_chunks_change_nothing(monkeypatch, room):
    rows = torch.randn(300, 6, generator=seeded(0))
    codebook = rows[:40] + 0.1
    whole, centres = nearest(rows, codebook), kmeans(rows, 20, seeded(1))
    largest = []
    table = squared_distances
    monkeypatch.setattr(module, "_TABLE", room)
    monkeypatch.setattr(module, "squared_distances", lambda *a: largest.append((t := table(*a)).numel()) or t)
    parts = nearest(rows, codebook)
    assert torch.equal(parts[0], whole[0])
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-5)
    assert max(largest) <= max(room, 40)  # a row at a time is the least
    torch.testing.assert_close(kmeans(rows, 20, seeded(1)), centres, rtol=1e-4, atol=1e-4)


def test_no_table_of_rows_by_codes_is_held():
    "20,000 rows and 8192 codes: the table would have 625 MiB. `kmeans` and `nearest` must take less than half of that."
    program = """
import resource, torch
from gti_nb.quantizer import kmeans, nearest
rows = torch.randn(20_000, 2)
nearest(rows[:10], rows[:10]), kmeans(rows[:10], 2, torch.Generator(), 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nearest(rows, kmeans(rows, 8192, torch.Generator().manual_seed(0), iterations=1))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 300


@pytest.mark.parametrize("seed", range(4))
def test_kmeans_agrees_with_scikit_learn(seed):
    """`kmeans` draws its starting centres from its generator, so the same draw starts scikit-learn's: the same fixed point. And
    one more step of theirs from ours changes nothing."""
    means = 4 * torch.randn(6, 5, generator=seeded(seed))
    rows = torch.cat([mean + torch.randn(60, 5, generator=seeded(seed + k)) for k, mean in enumerate(means)])
    begin = rows[torch.randperm(len(rows), generator=seeded(seed))[:8]]
    ours = kmeans(rows, 8, seeded(seed), iterations=500)
    theirs = KMeans(8, init=begin.numpy(), n_init=1, max_iter=500, tol=0, algorithm="lloyd").fit(rows.numpy())
    inertia = nearest(rows, ours)[1].sum().item()
    assert inertia == pytest.approx(theirs.inertia_, rel=1e-4)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.cluster_centers_), rtol=1e-4, atol=1e-4)
    again = KMeans(8, init=ours.numpy(), n_init=1, max_iter=1, algorithm="lloyd").fit(rows.numpy())
    torch.testing.assert_close(ours, torch.from_numpy(again.cluster_centers_), rtol=1e-4, atol=1e-4)
    assert nearest(rows, begin)[1].sum() > 1.1 * inertia  # there was something to do


@pytest.mark.parametrize("rows, k", [
    (torch.zeros(5, 2), 3), (torch.randn(1, 4, generator=seeded(0)), 6), (torch.randn(3, 4, generator=seeded(0)), 3),
    (torch.randn(7, 2, generator=seeded(0)).repeat(10, 1), 9), (1e6 * torch.randn(50, 3, generator=seeded(0)), 50)])
def test_kmeans_is_finite(rows, k):
    centres = kmeans(rows, k, seeded(0))
    assert centres.shape == (k, rows.shape[1]) and centres.isfinite().all()
    if k >= len(rows.unique(dim=0)):
        torch.testing.assert_close(centres[nearest(rows, centres)[0]], rows)


# --- start, restart --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 5, 16, 200])
def test_start_is_finite_and_happens_once(n):
    z = torch.randn(n, 4, generator=seeded(0))
    quantizer = ResidualQuantizer(3, 16, 4)
    quantizer.start(z, seeded(0))
    placed = quantizer.codebooks.detach().clone()
    assert placed.isfinite().all() and len(quantizer(z).codes[:, 0].unique()) == min(n, 16)
    copy = ResidualQuantizer(3, 16, 4)
    copy.load_state_dict(quantizer.state_dict())
    copy.start(torch.randn(n, 4), seeded(1))
    assert torch.equal(copy.codebooks, placed)


def test_restart_moves_just_the_dead_and_resets_their_averages():
    quantizer, z = ResidualQuantizer(2, 8, 3), torch.randn(100, 3, generator=seeded(0))
    quantizer.start(z, seeded(0))
    quantizer.codebooks.data[1, 2:4] = quantizer.sums[1, 2:4] = 100.0
    quantizer.mass[1] = 5.0
    before = quantizer.codebooks.detach().clone()
    found = quantizer(z)
    assert [quantizer.restart(found, 3, seeded(step)) for step in range(3)] == [0, 0, 2]
    moved = (quantizer.codebooks != before).any(-1)
    assert moved.nonzero().tolist() == [[1, 2], [1, 3]]
    assert quantizer.mass[1].tolist() == [5, 5, 1, 1, 5, 5, 5, 5]
    for code in (2, 3):
        assert (found.residuals[1] == quantizer.codebooks[1, code]).all(-1).any()
        assert torch.equal(quantizer.sums[1, code], quantizer.codebooks[1, code])
    assert quantizer.unused.max() == 0


# --- Sinkhorn --------------------------------------------------------------------------------------------------------------

def exponential_sinkhorn(distances, epsilon, iterations):
    "As it is mostly written: scale the exponentials."
    cost = 2 * (distances - distances.min()) / (distances.max() - distances.min())
    plan = torch.exp(-cost / epsilon)
    for _ in range(iterations):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0) * len(plan) / plan.shape[1]
    return plan


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("n, k", [(60, 12), (20, 20), (5, 9), (1, 4), (7, 1)])
def test_sinkhorn_is_what_the_plain_form_converges_to(n, k, epsilon):
    distances = torch.rand(n, k, generator=seeded(n), dtype=torch.float64)
    distances[0, 0] = 2  # so that the scaling has something to do, also for a single code
    plan = sinkhorn(distances, epsilon, iterations=3000).exp()
    torch.testing.assert_close(plan, exponential_sinkhorn(distances, epsilon, 6000), rtol=0, atol=1e-5)
    torch.testing.assert_close(plan.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-6)


def tables(n: int, k: int):
    "Distances that are easy, and some that are not."
    g = seeded(n * k)
    near, far = torch.randn(n, 8, generator=g), torch.randn(k, 8, generator=g)
    yield "random", torch.cdist(near, far) ** 2
    yield "all equal", torch.ones(n, k)
    yield "equal rows", (torch.cdist(near, far)[:1] ** 2).repeat(n, 1)
    yield "one code wins", torch.ones(n, k).index_fill(1, torch.tensor([0]), 0.0)
    yield "one code is far away", torch.cdist(near, torch.cat([far[1:], far[:1] + 50])) ** 2
    yield "one row is far away", torch.cdist(torch.cat([near[1:], near[:1] + 50]), far) ** 2
    yield "heavy tails", torch.exp(4 * torch.randn(n, k, generator=g))
    yield "zeros and ones", (torch.rand(n, k, generator=g) < 0.95).float()


@pytest.mark.parametrize("epsilon", [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("n, k", [(256, 32), (32, 32), (10, 32), (1, 4), (3, 2)])
def test_sinkhorn_is_finite_and_balanced(n, k, epsilon):
    for name, distances in tables(n, k):
        plan = sinkhorn(distances, epsilon)
        assert plan.isfinite().all(), name
        assert (plan.exp().sum(0) / (n / k) - 1).abs().max() < 1e-4, name


def test_sinkhorn_near_the_cheapest_assignment_shares_evenly():
    distances = torch.cdist(torch.randn(512, 16, generator=seeded(0)), torch.randn(32, 16, generator=seeded(1))) ** 2
    counts = [table.argmax(1).bincount(minlength=32) for table in (-distances, sinkhorn(distances, 0.003))]
    assert counts[0].max() > 40 and counts[0].min() < 8  # without it
    assert counts[1].max() <= 18 and counts[1].min() >= 14


def test_balanced_levels_only_while_training():
    torch.manual_seed(0)
    quantizer, z = ResidualQuantizer(2, 4, 3, balanced={1: 0.003}), torch.randn(80, 3) + 1
    plain, shared = quantizer.eval()(z).codes, quantizer.train()(z).codes
    assert torch.equal(plain[:, 0], shared[:, 0])
    assert shared[:, 1].bincount(minlength=4).max() <= 22 < plain[:, 1].bincount(minlength=4).max()


# --- diversity -------------------------------------------------------------------------------------------------------------

def loop(codebook, codes, groups):
    "LETTER's cross entropy, mean over all the companions that its draw could give."
    total = 0.0
    for c in codes.tolist():
        others = [j for j in range(len(codebook)) if j != c]
        companions = [j for j in others if groups[j] == groups[c]]
        norm = torch.logsumexp(torch.stack([codebook[c] @ codebook[j] for j in others]), 0)
        if companions:
            total = total + sum(norm - codebook[c] @ codebook[j] for j in companions) / len(companions)
    return total / len(codes)


@pytest.mark.parametrize("groups", [[0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 4]])
def test_diversity_is_the_loop(groups):
    groups, codes = torch.tensor(groups), torch.tensor([0, 5, 5, 2, 3, 0, 5])
    fast = torch.randn(6, 3, generator=seeded(0), dtype=torch.float64).requires_grad_()
    slow = fast.detach().clone().requires_grad_()
    one, other = diversity_loss(fast, codes, groups), loop(slow, codes, groups)
    torch.testing.assert_close(one, other)
    one.backward(), other.backward()
    torch.testing.assert_close(fast.grad, slow.grad)
    assert fast.grad.norm() > 1e-3


def test_diversity_of_codes_without_company_is_zero_and_moves_nothing():
    codebook = torch.randn(4, 3, generator=seeded(0)).requires_grad_()
    loss = diversity_loss(codebook, torch.tensor([0, 1, 3]), torch.arange(4))
    loss.backward()
    assert loss == 0 and torch.equal(codebook.grad, torch.zeros(4, 3))


@pytest.mark.parametrize("groups", [1, 2, 7, 16, 30])
def test_regroup_ends_for_any_number_of_groups(groups):
    torch.manual_seed(0)
    quantizer = ResidualQuantizer(2, 16, 4)
    quantizer.regroup(groups, seeded(0))
    assert [len(level.unique()) for level in quantizer.groups] == [min(groups, 16)] * 2
    losses = quantizer.diversity(quantizer(torch.randn(50, 4)))
    losses.sum().backward()
    assert losses.shape == (2,) and losses.isfinite().all() and quantizer.codebooks.grad.isfinite().all()
    assert (losses > 0).all() == (groups < 16)


def test_diversity_of_a_level_moves_just_that_level():
    torch.manual_seed(0)
    quantizer = ResidualQuantizer(3, 8, 4)
    quantizer.regroup(2, seeded(0))
    losses = quantizer.diversity(quantizer(torch.randn(50, 4)))
    (gradient,) = torch.autograd.grad(losses[1], quantizer.codebooks)
    assert (gradient.abs().sum((1, 2)) > 0).tolist() == [False, True, False]
