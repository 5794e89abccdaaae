"""Oracle: Jacobians formed row by row in float64, and what a latent can and cannot do."""

import pytest
import torch
from scipy.fft import dctn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from foveate.bottleneck.alignment import (
    alignment,
    leading_subspace,
    probe_subspace,
    random_subspace,
)
from foveate.bottleneck.coarse import Coarse, cosines
from foveate.bottleneck.examine import examine_latent
from foveate.bottleneck.latents import LATENTS, PowerSpherical
from foveate.bottleneck.layers import waves
from foveate.bottleneck.shape import Shape, choose_depths
from foveate.bottleneck.tap import ThroughLatent, open_latent, read_depths
from foveate.bottleneck.vae import Bottleneck, load_bottleneck, save_bottleneck
from foveate.diagnosis.diagnose import diagnose
from foveate.diagnosis.jacobian import TokenJacobian, check_adjoint, open_tap
from foveate.diagnosis.sketch import exact_sketch
from foveate.models import Model
from foveate.training.bottleneck import (
    LatentObjective,
    TokenExamples,
    Weights,
    evaluate_bottleneck,
    make_bottleneck,
    train_bottleneck,
)
from foveate.training.loop import Recipe
from tests import tiny
from tests.reference_jacobian import linear_jacobian, matrix_with, singular

SIZES = {"num_registers": 3, "latent_channels": 4, "width": 12, "num_heads": 2}
RANK_OF = {"gaussian": 12, "power-spherical": 9}  # one less for each spherical register


@pytest.fixture
def few():
    """Two images of 2 x 3 patches in float64, so that Jacobians are small."""
    return tiny.random_images((8, 12), torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def materialise(tail, tokens):
    """Each image's Jacobian by autograd, all outputs at once, ``(B, M, T, C)``."""

    def of_image(image):
        x = image[None].clone().requires_grad_(True)
        y = tail(x)[0]
        every = torch.eye(len(y), dtype=y.dtype)
        return torch.autograd.grad(y, x, every, is_grads_batched=True)[0][:, 0]

    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
        return torch.stack([of_image(image) for image in tokens])


def through(model, images, latent="power-spherical", task="saliency", **sizes):
    made = make_bottleneck(
        model, images[0], task, sizes={**SIZES, "latent": latent, **sizes}
    )
    return made.to(images.dtype)


def read(model, task, images):
    return read_depths(model.backbone, task, images)


# --- the network --------------------------------------------------------------------------


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize(
    ("size", "grid"), [(tiny.IMAGE, tiny.GRID), (tiny.OTHER_IMAGE, tiny.OTHER_GRID)]
)
def test_tokens_of_any_grid_come_back_in_their_shape(dense_model, latent, size, grid):
    task = through(dense_model, tiny.random_images(), latent)
    reading = read(dense_model, task, tiny.random_images(size))
    rebuilt = task.network(reading.tokens, grid, seeded())
    assert rebuilt.standardised.shape == rebuilt.target.shape == reading.tokens.shape
    assert len(rebuilt.features) == len(task.network.shape.depths) == 3
    assert rebuilt.features[0].shape == (2, 1 + grid[0] * grid[1], tiny.WIDTH)
    assert rebuilt.kl.shape == (2, 3)
    assert rebuilt.standardised.isfinite().all()


def test_a_draw_differs_from_the_mode_and_follows_the_seed(dense_model, images):
    task = through(dense_model, images)
    tokens = read(dense_model, task, images).tokens
    passes = [task.network(tokens, tiny.GRID, g).standardised for g in (None, None)]
    assert torch.equal(*passes)
    draws = [task.network(tokens, tiny.GRID, seeded(s)).standardised for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    assert not torch.allclose(draws[0], passes[0])


def test_images_do_not_mix(dense_model, images):
    task = through(dense_model, images)
    tokens = read(dense_model, task, images).tokens
    alone = task.network(tokens[:1], tiny.GRID).standardised
    assert_close(task.network(tokens, tiny.GRID).standardised[:1], alone)


def test_waves_know_rows_from_columns_and_span_the_picture():
    found = waves((2, 3)).unflatten(0, (2, 3))
    assert_close(found[0, 0, :32], found[0, 2, :32])  # the same row
    assert_close(found[0, 1, 32:], found[1, 1, 32:])  # the same column
    assert_close(found[0, 0, 0], torch.tensor(0.25 * torch.pi).double().sin())
    assert_close(found[1, 2, 48], torch.tensor(5 / 6 * torch.pi).double().cos())
    middle = waves((3, 5)).unflatten(0, (3, 5))[1, 2]
    assert_close(middle, waves((1, 1))[0])


@pytest.mark.parametrize("grid", [(4, 6), (5, 5)])
def test_cosines_are_the_slowest_of_a_discrete_cosine_transform(grid):
    count, num_patches = 6, grid[0] * grid[1]
    x = torch.randn(num_patches, generator=seeded(), dtype=torch.float64)
    found = cosines(count, grid)
    transform = torch.from_numpy(dctn(x.view(grid).numpy(), norm="ortho"))
    slowest = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]
    expected = torch.stack([transform[pair] for pair in slowest])
    assert_close(found @ x / num_patches**0.5, expected)
    gram = found @ found.T / num_patches
    assert_close(gram, torch.eye(count, dtype=torch.float64))


def test_the_linear_latent_is_exact_where_it_has_room():
    coarse = Coarse(4, 5, 5).double()
    x = torch.randn(9, 4, 5, generator=seeded(), dtype=torch.float64)
    coarse.start(coarse.waves(x, (2, 2)), 5)
    registers = coarse.encode(x, (2, 2))
    assert_close(coarse.decode(registers, (2, 2)), x)
    assert_close(registers.square().mean((0, 2)), torch.ones(4).double())


def test_the_linear_latent_takes_the_channels_that_vary_most():
    """Oracle: truncation of the singular values of all coefficients, Eckart and Young."""
    coarse = Coarse(4, 5, 2).double()
    x = torch.randn(9, 4, 5, generator=seeded(), dtype=torch.float64)
    coarse.start(coarse.waves(x, (2, 2)), 2)
    rebuilt = coarse.decode(coarse.encode(x, (2, 2)), (2, 2))
    values = torch.linalg.svdvals((x - x.mean(0)).flatten(0, 1))
    assert_close((rebuilt - x).square().sum(), values[2:].square().sum())


def test_waves_that_a_grid_is_too_coarse_for_keep_their_unit():
    coarse = Coarse(6, 5, 5).double()
    x = torch.randn(9, 4, 5, generator=seeded(), dtype=torch.float64)
    coarse.start(coarse.waves(x, (2, 2)), 5)  # the fifth and sixth vanish on two rows
    assert_close(coarse.size[4:], torch.ones(2).double())
    assert float(coarse.encode(x, (2, 2))[:, 4:].detach().abs().max()) < 1e-12
    assert_close(coarse.decode(coarse.encode(x, (2, 2)), (2, 2)), x)


def test_the_linear_latent_survives_a_normalisation():
    """Exactly where registers have their mean length, and in proportion elsewhere."""
    coarse = Coarse(4, 5, 6).double()
    x = torch.randn(9, 4, 5, generator=seeded(), dtype=torch.float64)
    coarse.start(coarse.waves(x, (2, 2)), 5)
    assert_close(coarse.encode(x, (2, 2))[..., 5], torch.full((9, 4), 5**0.5).double())
    offset = coarse.waves(x, (2, 2)) - coarse.middle
    usual = offset.norm(dim=-1, keepdim=True) / (5**0.5 * coarse.size[:, None])
    for length in (1.0, 0.5, 2.0):
        chosen = coarse.middle + length * offset / usual  # of so many mean lengths
        patches = torch.einsum("bjf,jn->bnf", chosen, cosines(4, (2, 2)))
        registers = coarse.encode(patches, (2, 2))
        kept = PowerSpherical.place(registers) * PowerSpherical.scale(6)
        shrunk = (2 / (1 + length**2)) ** 0.5
        rebuilt = coarse.waves(coarse.decode(kept, (2, 2)), (2, 2)) - coarse.middle
        assert_close(rebuilt, shrunk * (chosen - coarse.middle))


def test_statistics_are_those_of_each_channel(dense_model):
    images = torch.cat([tiny.random_images(seed=s) for s in (1, 2)])
    task = through(dense_model, images)
    tokens = read(dense_model, task, images).tokens
    network = task.network
    network.measure(tokens.split(3), tiny.GRID)
    patches = tokens[:, 1:].flatten(0, 1)
    assert_close(network.mean[1], patches.mean(0))
    assert_close(network.std[1], patches.std(0, correction=0))
    assert_close(network.mean[0], tokens[:, 0].mean(0))
    standardised = network.standardise(tokens)
    assert_close(standardised[:, 1:].square().mean((0, 1)), torch.ones(3 * tiny.WIDTH))
    assert_close(torch.cat(network.split(standardised), -1), tokens)


def test_a_channel_that_does_not_vary_keeps_its_unit(dense_model, images):
    network = through(dense_model, images).network
    tokens = torch.randn(2, 36, 3 * tiny.WIDTH, generator=seeded())
    tokens[..., 5] = 3.0
    network.measure([tokens], tiny.GRID)
    assert_close(network.std[:, 5], torch.ones(2))
    assert float(network.std[1, 6]) != 1.0
    with pytest.raises(ValueError, match=r"at least one image; got none\."):
        network.measure([], tiny.GRID)


def test_a_saved_bottleneck_is_the_same(dense_model, images, tmp_path):
    task = through(dense_model, images, "gaussian")
    tokens = read(dense_model, task, images).tokens
    task.network.measure([tokens], tiny.GRID)
    save_bottleneck(task.network, tmp_path / "deep" / "z.safetensors")
    loaded = load_bottleneck(tmp_path / "deep" / "z.safetensors")
    assert loaded.shape == task.network.shape
    expected, found = (n(tokens, tiny.GRID) for n in (task.network, loaded))
    assert torch.equal(expected.standardised, found.standardised)
    with pytest.raises(ValueError, match=r"save_bottleneck wrote; got '.*none'"):
        load_bottleneck(tmp_path / "none")


def test_depths_are_those_of_the_task_or_evenly_spaced():
    assert choose_depths((12,)) == (3, 6, 9, 12)
    assert choose_depths((24,), 3) == (8, 16, 24)
    assert choose_depths((3,)) == (1, 2, 3)
    assert choose_depths((2, 5, 8, 11)) == (2, 5, 8, 11)
    assert choose_depths((1, 10)) == (1, 3, 5, 8, 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent": "cubic"}, r"one of gaussian, power-spherical; got 'cubic'\."),
        ({"depths": (3, 1)}, r"depths must ascend; got \(3, 1\)\."),
        ({"num_registers": 0}, r"at least 2; got 0 and 4\."),
        ({"width": 13}, r"multiple of num_heads; got 13 and 2\."),
    ],
)
def test_sizes_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Shape(**{"depths": (1, 2), "num_channels": 8, "num_prefix": 1, **SIZES, **fields})


def test_tokens_that_do_not_fit_are_refused(dense_model, images):
    task = through(dense_model, images)
    tokens = read(dense_model, task, images).tokens
    with pytest.raises(ValueError, match=r"\(B, 16, 108\) for a grid of 5 x 3"):
        task.network.encode(tokens, (5, 3))
    with pytest.raises(ValueError, match=r"hold those that the task reads, \(3,\)"):
        through(dense_model, images, depths=(1, 2))
    with pytest.raises(ValueError, match=r"must be at most 3 .* got \(3, 4\)"):
        through(dense_model, images, depths=(3, 4))


# --- the latent as a tap ------------------------------------------------------------------


@pytest.mark.parametrize("latent", LATENTS)
def test_products_with_the_latent_are_those_of_the_materialised_jacobian(
    double_model, few, latent
):
    task = through(double_model, few, latent)
    task.network.measure([read(double_model, task, few).tokens], (2, 3))
    tap = open_latent(double_model.backbone, task, few)
    jacobian = TokenJacobian(tap.tail, tap.z)
    assert jacobian.route == "recorded"
    assert check_adjoint(jacobian, seeded()) < 1e-10
    truth = materialise(tap.tail, tap.z).flatten(2)  # (B, M, R * d)
    v = torch.randn(2, *tap.z.shape, generator=seeded(), dtype=torch.float64)
    assert_close(jacobian.jvp(v), torch.einsum("bmk,rbk->rbm", truth, v.flatten(2)))
    assert_close(jacobian.output, output_through(double_model, task, few))


def output_through(model, task, images):
    tasks = {"through": task}
    return Model("tiny", model.backbone, tasks, model.transform)(images, "through").flatten(
        1
    )


def test_a_finite_step_of_the_latent_moves_the_output_as_the_jacobian_says(
    double_model, few
):
    task = through(double_model, few)
    tap = open_latent(double_model.backbone, task, few)
    v = torch.randn(tap.z.shape, generator=seeded(), dtype=torch.float64)
    moved = (tap.tail(tap.z + 1e-5 * v) - tap.tail(tap.z - 1e-5 * v)) / 2e-5
    assert_close(
        TokenJacobian(tap.tail, tap.z).jvp(v[None])[0], moved, rtol=1e-6, atol=1e-9
    )


def test_a_spherical_latent_has_no_radial_derivative(double_model, few):
    task = through(double_model, few)
    tap = open_latent(double_model.backbone, task, few)
    jacobian = TokenJacobian(tap.tail, tap.z)
    radial = torch.zeros(3, *tap.z.shape, dtype=torch.float64)
    for r in range(3):
        radial[r, :, r] = tap.z[:, r]
    scale = jacobian.jvp(torch.ones_like(radial)).norm()
    assert float(jacobian.jvp(radial).norm() / scale) < 1e-12


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("depth", [1, 3])
def test_no_path_goes_past_the_latent(double_model, few, latent, depth):
    task = through(double_model, few[:1], latent)
    task.network.measure([read(double_model, task, few).tokens], (2, 3))
    tap = open_tap(double_model.backbone, task, few[:1], depth)
    truth = materialise(tap.tail, tap.tokens.x)[0]
    values, _ = singular(truth)
    rank = RANK_OF[latent]
    assert len(values) == 96
    assert float(values[rank] / values[0]) < 1e-10
    assert float(values[rank - 1] / values[0]) > 1e-7
    assert float(truth[:, 0].norm()) > 0  # the class token goes through it too


def test_a_model_with_the_task_is_diagnosed_like_any(double_model, few):
    task = through(double_model, few[:1])
    model = Model("tiny", double_model.backbone, {"z": task}, double_model.transform)
    found = diagnose(model, few[:1], "z", depth=2, rank=3, exact="always")
    tap = open_tap(model.backbone, task, few[:1], 2)
    values = singular(materialise(tap.tail, tap.tokens.x)[0])[0].square()
    kappa = float(values[:3].sum() / values.sum())
    assert_close(found.images[0]["all"].statistics()["kappa_cap"], kappa)


# --- subspaces ----------------------------------------------------------------------------

VALUES = 0.7 ** torch.arange(12, dtype=torch.float64)


def flat_right(matrices, rank):
    return torch.stack([singular(m[:, :, None])[1][:rank, :, 0] for m in matrices])


@pytest.fixture
def matrices():
    return torch.stack([matrix_with(VALUES, 20, seed) for seed in (1, 2)])


def generators(seed=0):
    return [seeded(seed), seeded(seed + 100)]


def test_alignment_is_the_mean_squared_cosine():
    angles = torch.tensor([0.3, 1.1], dtype=torch.float64)
    u = torch.eye(6, dtype=torch.float64)[None, :2]
    v = torch.zeros(1, 2, 6, dtype=torch.float64)
    for i, angle in enumerate(angles):
        v[0, i, i], v[0, i, i + 2] = angle.cos(), angle.sin()
    assert_close(alignment(u, v), angles.cos().square().mean()[None])
    assert_close(alignment(v.flip(1), v), torch.ones(1).double())
    with pytest.raises(ValueError, match=r"got \(1, 2, 6\) and \(1, 3, 6\)"):
        alignment(u, torch.zeros(1, 3, 6))


def test_a_random_subspace_covers_r_of_n_in_the_mean():
    many = [seeded(s) for s in range(400)]
    u = random_subspace(torch.zeros(400, 5, 4, dtype=torch.float64), 3, many)
    v = torch.eye(20, dtype=torch.float64)[:3].expand(400, -1, -1)
    covered = alignment(u, v)
    error = float(covered.std()) / 400**0.5
    assert abs(float(covered.mean()) - 3 / 20) < 4 * error
    assert error < 0.01


def test_an_exact_sketch_gives_the_leading_singular_vectors(matrices):
    sketch = exact_sketch(linear_jacobian(matrices, 5), 0)
    found = leading_subspace(sketch, 4)
    assert_close(alignment(found, flat_right(matrices, 4)), torch.ones(2).double())
    with pytest.raises(ValueError, match=r"from 1 to the 12 rows of the sketch; got 13\."):
        leading_subspace(sketch, 13)


def test_probes_are_one_round_of_subspace_iteration(matrices):
    """The definition: an orthonormal basis of J^T J Omega, and its best r directions."""
    jacobian = linear_jacobian(matrices, 5)
    for width in (4, 7):
        found = probe_subspace(jacobian, 4, width, 1, generators())
        omega = random_subspace(jacobian.tokens, width, generators())
        basis = torch.linalg.qr(matrices.mT @ matrices @ omega.mT).Q  # (B, n, width)
        right = torch.linalg.svd(matrices @ basis).Vh[:, :4].mT
        assert_close(alignment(found, (basis @ right).mT), torch.ones(2).double())


def test_probes_count_their_products_and_converge(matrices):
    jacobian = linear_jacobian(matrices, 5)
    truth = flat_right(matrices, 4)
    covered = []
    for width, iterations in ((4, 1), (8, 1), (8, 8)):
        before = jacobian.products.jvp
        found = probe_subspace(jacobian, 4, width, iterations, generators())
        extra = width if width > 4 else 0
        assert jacobian.products.jvp - before == width * iterations + extra
        covered.append(alignment(found, truth))
    assert (covered[0] < covered[1]).all()
    assert_close(covered[2], torch.ones(2).double(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"iterations >= 1; got 4, 3, 1\."):
        probe_subspace(jacobian, 4, 3, 1, generators())


@pytest.mark.parametrize("exact", [True, False])
def test_examining_a_latent_tells_the_routes_apart(matrices, exact):
    found = examine_latent(
        linear_jacobian(matrices, 5), 4, generators(), exact=exact, widths=(4,)
    )
    energies = VALUES.square()
    for of_image in found:
        aligned = of_image.alignment
        assert_close(aligned["deterministic"], 1.0, rtol=0, atol=1e-6)
        assert aligned["random"] < aligned["randomised_4"] < 1 - 1e-6
        assert aligned["randomised"] > 1 - 1e-6  # as many probes as there are dimensions
        kappa = float(energies[:4].sum() / energies.sum())
        assert_close(of_image.statistics["kappa_cap"], kappa)
    with pytest.raises(ValueError, match=r"rank must be from 1 to 12 here; got 13\."):
        examine_latent(linear_jacobian(matrices, 5), 13, generators())


# --- training -----------------------------------------------------------------------------


def test_examples_are_what_the_network_says_and_are_kept(dense_model, images):
    calls = []

    class Counted:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            calls.append(index)
            return images[index]

    task = through(dense_model, images)
    examples = TokenExamples(dense_model.backbone, task, Counted())
    calls.clear()
    batch = examples.batch(torch.tensor([1, 0, 1]))
    again = examples.batch(torch.tensor([1, 0, 1]))
    assert sorted(calls) == [0, 1]
    assert torch.equal(batch["tokens"], again["tokens"])
    assert_close(batch["output"][1], dense_model(images[:1], "saliency").flatten())
    reading = read(dense_model, task, images)
    assert_close(batch["tokens"], reading.tokens[[1, 0, 1]])
    with pytest.raises(ValueError, match=r"images must hold at least one; got none\."):
        TokenExamples(dense_model.backbone, task, images[:0])


@pytest.mark.parametrize("latent", LATENTS)
def test_the_loss_is_the_weighted_sum_of_its_parts(dense_model, images, latent):
    task = through(dense_model, images, latent)
    examples = TokenExamples(dense_model.backbone, task, images)
    batch = examples.batch(torch.arange(2))
    weights = Weights(task=0.5, kl=0.25)
    objective = LatentObjective(dense_model.backbone, task, examples.layout, weights)
    loss = objective(task.network, batch, seeded())
    rebuilt = task.network(batch["tokens"], tiny.GRID, seeded())
    y = dense_model.task("saliency").decode(
        dense_model.backbone, (rebuilt.features[-1],), examples.layout
    )
    moved = (y.flatten(1) - batch["output"]).norm(dim=1) / batch["output"].norm(dim=1)
    squared = (rebuilt.standardised - rebuilt.target).square().mean()
    expected = squared + 0.5 * moved.mean() + 0.25 * rebuilt.kl.mean() / 4
    assert_close(loss, expected)


@pytest.mark.parametrize("latent", LATENTS)
def test_gradients_of_the_loss_are_those_of_finite_differences(double_model, few, latent):
    task = through(double_model, few, latent)
    examples = TokenExamples(double_model.backbone, task, few)
    batch = examples.batch(torch.arange(2))
    task.network.measure([batch["tokens"]], (2, 3))
    weights = Weights(task=0.7, kl=0.1)
    objective = LatentObjective(double_model.backbone, task, examples.layout, weights)
    # What decides the noise itself (the spread of a spherical latent) is tested apart.
    names = ("inlet.weight", "from_latent.weight", "place_out.prefix", "outlet.1.bias")
    for name in names:
        p = task.network.get_parameter(name)
        (slope,) = torch.autograd.grad(
            _loss(objective, task, batch, latent), p, retain_graph=False
        )
        v = torch.randn(p.shape, generator=seeded(3), dtype=torch.float64)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(step * v)
                values.append(float(_loss(objective, task, batch, latent)))
                p.sub_(step * v)
        difference = (values[0] - values[1]) / 2e-5
        assert_close(float((slope * v).sum()), difference, rtol=1e-5, atol=1e-7)


def _loss(objective, task, batch, latent):
    """At a draw of a Gaussian; at the mode of a spherical one, whose draws reject."""
    if latent == "gaussian":
        return objective(task.network, batch, seeded())
    return objective.weights.loss(objective.errors(task.network, batch))


@pytest.mark.parametrize("latent", LATENTS)
def test_training_learns_and_leaves_the_model_alone(dense_model, latent):
    images = torch.cat([tiny.random_images(seed=s) for s in range(4)])
    sizes = {"num_registers": 8, "latent_channels": 16, "width": 24}
    task = through(dense_model, images, latent, **sizes)
    before = {k: v.clone() for k, v in dense_model.state_dict().items()}
    train_bottleneck(dense_model, images, task, Recipe(steps=1, learning_rate=1e-9))
    start = evaluate_bottleneck(dense_model, task, images)
    recipe = Recipe(steps=60, batch_size=4, learning_rate=1e-2, validate_every=20)
    seen = []
    training = train_bottleneck(
        dense_model,
        images,
        task,
        recipe,
        validation=images,
        watch=lambda now: seen.append(now.step),
    )
    end = evaluate_bottleneck(dense_model, task, images)
    assert seen == [20, 40, 60]
    assert float(end.reconstruction.mean()) < 0.9 * float(start.reconstruction.mean())
    assert float(end.task.mean()) < 0.9 * float(start.task.mean())
    score = -float((end.reconstruction + end.task).mean())
    assert_close(training.best_score, score, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(v, before[k]) for k, v in dense_model.state_dict().items())


def test_a_training_that_was_killed_goes_on(dense_model, images, tmp_path):
    recipe = Recipe(steps=6, batch_size=2, validate_every=3)

    def train(state, watch=None):
        task = through(dense_model, images)
        train_bottleneck(dense_model, images, task, recipe, state=state, watch=watch)
        return task.network.state_dict()

    class KilledError(Exception):
        pass

    def kill(training):
        raise KilledError

    whole = train(None)
    with pytest.raises(KilledError):
        train(tmp_path / "state", kill)
    resumed = train(tmp_path / "state")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(v, resumed[k]) for k, v in whole.items())


def test_weights_below_zero_are_refused():
    with pytest.raises(ValueError, match=r"kl must be at least 0; got -1\."):
        Weights(kl=-1)


def test_the_task_behind_a_latent_keeps_what_it_needs(dense_model, images):
    """The class token is rebuilt too, so that a task that reads it alone works."""
    task = through(dense_model, images, task="cls")
    assert isinstance(task, ThroughLatent)
    assert isinstance(task.network, Bottleneck)
    tap = open_latent(dense_model.backbone, task, images)
    assert tap.tail(tap.z).shape == tap.reading.output.shape == (2, tiny.WIDTH)
    assert_close(tap.reading.output, dense_model(images, "cls"))
