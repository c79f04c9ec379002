"""pixel_attention and PixelAttention against loops in float64, and what they refuse."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.layers.pixel_attention import KEYS, MATRICES
from tests.reference import loops


def random_params(channels, rng, std=None):
    std = channels**-0.5 if std is None else std
    params = {}
    for key in KEYS:
        shape = (channels, channels) if key in MATRICES else (channels,)
        params[key] = rng.normal(0, std if key in MATRICES else 0.3, shape)
    params["norm_weight"] += 1
    return params


def tensors(params, dtype):
    return {key: torch.tensor(value).to(dtype) for key, value in params.items()}


def reference(x, params, num_groups, num_heads, eps=1e-5):
    """The loops, on exactly the numbers that the given tensors hold."""
    arrays = {key: value.double().numpy() for key, value in params.items()}
    return loops.pixel_attention(x.double().numpy(), arrays, num_groups, num_heads, eps)


def relative_error(out, expected, x=0.0):
    """The largest difference over the largest number that is there: the result, x, or what is
    added to x, since where the two cancel the result is smaller than the rounding of either."""
    x = np.asarray(x, float)
    largest = max(np.abs(expected).max(), np.abs(x).max(), np.abs(expected - x).max())
    return np.abs(out.detach().double().numpy() - expected).max() / largest


@st.composite
def cases(draw):
    channels = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    divisors = [i for i in range(1, channels + 1) if channels % i == 0]
    return {
        "shape": (draw(st.integers(1, 2)), channels, *draw(st.tuples(*[st.integers(1, 5)] * 2))),
        "num_heads": draw(st.sampled_from(divisors)),
        "num_groups": draw(st.sampled_from(divisors)),
        "layout": draw(st.sampled_from(["contiguous", "channels_last", "strided", "transposed"])),
        "offset": draw(st.sampled_from([0.0, 1.0, -30.0, 1000.0])),
        "spread": draw(st.sampled_from([1.0, 1.0, 1e-3, 0.0])),
        "seed": draw(st.integers(0, 2**31)),
    }


def make_map(case, dtype, rng):
    b, c, h, w = case["shape"]
    x = torch.tensor(case["offset"] + case["spread"] * rng.normal(size=(b, c, h, w))).to(dtype)
    if case["layout"] == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if case["layout"] == "strided":
        wide = torch.zeros(b, 2 * c, h, 3 * w, dtype=dtype)
        wide[:, ::2, :, ::3] = x
        return wide[:, ::2, :, ::3]
    if case["layout"] == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


# A sum of 25 pixels and sums over 16 channels may each lose half a unit a term; half precision
# is summed in float32 and rounded some six times. The worst of 12,000 cases: 1.9, 4.6, 0.5, 1.0.
ROUNDINGS = {torch.float32: 32, torch.float64: 32, torch.float16: 4, torch.bfloat16: 4}
HALF = (torch.float16, torch.bfloat16)


def rounding_scale(x, params, num_groups, num_heads, eps=1e-5):
    """What one rounding may cost: the largest of |x| and of the added terms without their signs,
    the latter times 1 + the largest logit so computed, since an error of a logit is one of a
    weight, relatively. Terms that cancel, and large logits, thus loosen the bound by as much as
    they cost any way of computing the formula."""
    x, p = x.double().numpy(), {key: value.double().numpy() for key, value in params.items()}
    b, c, h, w = x.shape
    normed = loops.group_norm(x, num_groups, p["norm_weight"], np.zeros(c), eps)
    z = np.abs(normed) + np.abs(p["norm_bias"])[:, None, None]
    z = z.reshape(b, c, h * w).transpose(0, 2, 1)
    q, k, v = (z @ np.abs(p[f"{n}_weight"]).T + np.abs(p[f"{n}_bias"]) for n in "qkv")
    heads = (q.max(1) * k.max(1)).reshape(b, num_heads, -1).sum(-1)
    logit = heads.max() / math.sqrt(c // num_heads)
    added = (v @ np.abs(p["out_weight"]).T + np.abs(p["out_bias"])).max()
    return max(np.abs(x).max(), added * (1 + logit))


def roundings(case, std, dtype):
    """The error of one case in units of the last place of `rounding_scale`."""
    params = tensors(
        random_params(case["shape"][1], np.random.default_rng(case["seed"]), std), dtype
    )
    x = make_map(case, dtype, np.random.default_rng(case["seed"]))
    where = (case["num_groups"], case["num_heads"])
    out = regard.pixel_attention(x, params, *where)
    assert out.shape == x.shape
    assert out.dtype == dtype
    error = np.abs(out.double().numpy() - reference(x, params, *where)).max()
    return error / (torch.finfo(dtype).eps * rounding_scale(x, params, *where))


@settings(max_examples=500)
@given(cases(), st.sampled_from([None, None, 0.5, 1.0, 2.0]))
def test_agrees_with_the_loops(case, std):
    for dtype in (torch.float32, torch.float64, *HALF):
        if dtype in HALF and case["spread"] != 1.0:
            continue  # rounding the input to half precision leaves nothing of so small a spread
        assert roundings(case, std, dtype) <= ROUNDINGS[dtype]


def test_terms_that_cancel_cost_no_more_than_their_rounding():
    # Here the added map is a tenth of the terms it sums, so relative to itself the error is large.
    where = {"num_heads": 1, "num_groups": 1, "layout": "contiguous"}
    case = {"shape": (1, 1, 2, 2), "offset": 0.0, "spread": 1e-3, "seed": 1173331, **where}
    assert roundings(case, None, torch.float32) <= 2


def test_hand_computed_two_pixels():
    # One channel per group, pixels 1 and -1: normalised they are ±1/√(1 + eps). With q = z,
    # k = z, v = z and out = identity the scores are ±z², so the first pixel receives
    # z·(p - (1 - p)) with p = sigmoid(2 z²).
    x = torch.tensor([[[[1.0, -1.0]]]], dtype=torch.float64)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    params = {key: one if key in MATRICES else zero for key in KEYS}
    params["norm_weight"] = torch.ones(1, dtype=torch.float64)
    z = 1 / math.sqrt(1 + 1e-5)
    p = 1 / (1 + math.exp(-2 * z * z))
    out = regard.pixel_attention(x, params, 1, 1)
    expected = torch.tensor([[[[1 + z * (2 * p - 1), -1 - z * (2 * p - 1)]]]], dtype=out.dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-15)


def test_single_pixel_with_one_channel_a_group_adds_one_vector():
    # The norm of a lone value is its bias, whatever the value: every sample gets the same vector
    # W_o (W_v β + b_v) + b_o. Here it is set to the one in the published example.
    x = torch.tensor([[-0.748, -0.549, -0.535, 1.884], [0.514, -0.94, -0.825, 0.399]])
    x = x[:, :, None, None]
    added = torch.tensor([-0.118129, -0.165209, -0.14307, 0.171774])
    params = tensors(random_params(4, np.random.default_rng(0)), torch.float32)
    value = params["v_weight"] @ params["norm_bias"] + params["v_bias"]
    params["out_bias"] = added - params["out_weight"] @ value
    out = regard.pixel_attention(x, params, 4, 2)
    expected = torch.tensor(
        [[-0.866129, -0.714209, -0.67807, 2.055774], [0.395871, -1.105209, -0.96807, 0.570774]]
    )
    torch.testing.assert_close(out[:, :, 0, 0], expected, rtol=0, atol=2e-6)
    alone = regard.pixel_attention(x[:1], params, 4, 2)
    torch.testing.assert_close(alone, out[:1], rtol=0, atol=1e-6)


def test_gradcheck():
    rng = np.random.default_rng(1)
    params = tensors(random_params(4, rng), torch.float64)
    leaves = [value.requires_grad_() for value in params.values()]
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)

    def call(x, *values):
        return regard.pixel_attention(x, dict(zip(KEYS, values, strict=True)), 2, 2)

    assert torch.autograd.gradcheck(call, (x, *leaves))


@pytest.mark.parametrize("as_type", [np.asarray, lambda t: np.asarray(t).tolist(), torch.tensor])
def test_takes_tensors_arrays_and_lists(as_type):
    params = random_params(4, np.random.default_rng(2))
    x = np.random.default_rng(3).normal(size=(1, 4, 2, 2)).astype(np.float32)
    given = {key: as_type(value) for key, value in params.items()}
    out = regard.pixel_attention(as_type(x), given, 2, 2)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.float32
    assert relative_error(out, loops.pixel_attention(x.astype(float), params, 2, 2)) < 2e-6


def test_lists_of_integers_become_the_default_dtype():
    params = {key: [[1, 0], [0, 1]] if key in MATRICES else [1, 2] for key in KEYS}
    out = regard.pixel_attention([[[[1, 2]], [[3, 5]]]], params, 1, 1)
    arrays = {key: np.array(value, float) for key, value in params.items()}
    expected = loops.pixel_attention(np.array([[[[1, 2]], [[3, 5]]]], float), arrays, 1, 1)
    assert out.dtype == torch.get_default_dtype()
    assert relative_error(out, expected) < 2e-6


def test_odd_arrays_are_read_right():
    params = random_params(2, np.random.default_rng(4))
    x = np.random.default_rng(5).normal(size=(1, 2, 3, 2))
    expected = regard.pixel_attention(x, params, 1, 1)
    frozen = x.copy()
    frozen.setflags(write=False)
    for odd in (x.astype(">f8"), x[:, :, ::-1][:, :, ::-1], np.asfortranarray(x), frozen):
        torch.testing.assert_close(regard.pixel_attention(odd, params, 1, 1), expected)


def test_empty_batch_keeps_gradients():
    params = tensors(random_params(4, np.random.default_rng(0)), torch.float32)
    for value in params.values():
        value.requires_grad_()
    out = regard.pixel_attention(torch.empty(0, 4, 3, 2), params, 2, 2)
    assert out.shape == (0, 4, 3, 2)
    out.sum().backward()
    assert all(value.grad is not None and not value.grad.any() for value in params.values())


def test_the_input_is_not_changed():
    params = tensors(random_params(4, np.random.default_rng(0)), torch.float32)
    x = torch.randn(1, 4, 2, 2)
    before = x.clone(), copy.deepcopy(params)
    regard.pixel_attention(x, params, 2, 2)
    assert torch.equal(x, before[0])
    assert all(torch.equal(params[key], before[1][key]) for key in KEYS)


GOOD = tensors(random_params(4, np.random.default_rng(0)), torch.float32)
X = torch.zeros(1, 4, 2, 2)


@pytest.mark.parametrize(
    ("x", "changes", "groups", "heads", "message"),
    [
        (torch.zeros(4, 2, 2), {}, 2, 2, r"x has shape \(4, 2, 2\); give \(batch, channels"),
        (torch.zeros(1, 4, 0, 2), {}, 2, 2, r"x has shape \(1, 4, 0, 2\).*at least"),
        (torch.zeros(1, 4, 2, 0), {}, 2, 2, r"x has shape \(1, 4, 2, 0\).*at least"),
        (torch.zeros(1, 0, 2, 2), {}, 1, 1, r"x has shape \(1, 0, 2, 2\).*at least"),
        (X.long(), {}, 2, 2, r"x has dtype torch.int64; give float16"),
        (X.bool(), {}, 2, 2, r"x has dtype torch.bool"),
        (X.to(torch.complex64), {}, 2, 2, r"x has dtype torch.complex64"),
        (X.long().numpy(), {}, 2, 2, r"x is a ndarray .*its elements are int64"),
        ("map", {}, 2, 2, r"x is a str that makes no floating-point tensor"),
        ([[[[True]]]], {}, 1, 1, r"x is a list .*its elements are bool"),
        ([[1.0], [1.0, 2.0]], {}, 1, 1, r"x is a list that makes no floating-point tensor"),
        (X, {"k_bias": None}, 2, 2, r"params lacks k_bias; give exactly norm_weight"),
        (X, {"k_bais": GOOD["k_bias"]}, 2, 2, r"unknown key 'k_bais' \(nearest: k_bias"),
        (X, {"v_weight": torch.zeros(4, 5)}, 2, 2, r"v_weight has shape \(4, 5\).*give \(4, 4\)"),
        (X, {"out_bias": torch.zeros(4, 1)}, 2, 2, r"out_bias has shape \(4, 1\).*give \(4,\)"),
        (X, {"q_bias": torch.zeros(4, device="meta")}, 2, 2, r"q_bias is on device meta"),
        (X, {"q_bias": torch.zeros(4).bool()}, 2, 2, r"q_bias has dtype torch.bool"),
        (X, {"q_bias": GOOD["q_bias"] * 1j}, 2, 2, r"q_bias has dtype torch.complex64"),
        (X, {}, 3, 2, r"num_groups=3 does not divide the 4 channels: give one of 1, 2, 4"),
        (X, {}, 2, 3, r"num_heads=3 does not divide the 4 channels"),
        (X, {}, 2, 0, r"num_heads=0: give a positive integer"),
        (X, {}, -2, 2, r"num_groups=-2: give a positive integer"),
        (X, {}, True, 2, r"num_groups=True: give a positive integer"),
        (X, {}, 2, 2.0, r"num_heads=2.0: give a positive integer"),
        (X, {}, 2, "2", r"num_heads='2': give a positive integer"),
    ],
)
def test_refusals(x, changes, groups, heads, message):
    params = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    with pytest.raises(regard.InputError, match=message):
        regard.pixel_attention(x, params, groups, heads)


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), True, "small"])
def test_a_bad_eps_is_refused(eps):
    with pytest.raises(regard.InputError, match=r"eps=.*give a finite number"):
        regard.pixel_attention(X, GOOD, 2, 2, eps=eps)


def test_params_that_are_no_mapping_are_refused():
    with pytest.raises(regard.InputError, match="params is a list; give a mapping"):
        regard.pixel_attention(X, list(GOOD.values()), 2, 2)


def test_module_starts_as_the_identity():
    x = torch.randn(2, 64, 3, 5)
    assert torch.equal(regard.PixelAttention(64, num_heads=4)(x), x)


@pytest.mark.parametrize("training", [True, False])
def test_module_computes_the_function(training):
    params = tensors(random_params(8, np.random.default_rng(0)), torch.float32)
    module = regard.PixelAttention.from_params(params, 4, 2, eps=1e-6).train(training)
    x = torch.randn(2, 8, 3, 4)
    assert relative_error(module(x), reference(x, params, 4, 2, 1e-6)) < 2e-6
    with torch.no_grad():
        assert relative_error(module(x), reference(x, params, 4, 2, 1e-6)) < 2e-6
    assert list(module.state_dict()) == list(KEYS)
    assert all(torch.equal(module.params()[key], params[key]) for key in KEYS)
    assert module.params()["q_weight"] is module.q_weight


def test_from_params_copies():
    params = tensors(random_params(4, np.random.default_rng(0)), torch.float64)
    module = regard.PixelAttention.from_params(params, 2, 2)
    with torch.no_grad():
        module.q_weight.zero_()
    assert module.q_weight.dtype == torch.float64
    assert params["q_weight"].any()


def test_module_refusals():
    with pytest.raises(regard.InputError, match="num_groups=32 does not divide the 48 channels"):
        regard.PixelAttention(48)
    with pytest.raises(regard.InputError, match="channels=0: give a positive integer"):
        regard.PixelAttention(0)
    with pytest.raises(regard.InputError, match="2 channels; this block has 4"):
        regard.PixelAttention(4, num_groups=2)(torch.zeros(1, 2, 3, 3))
    with pytest.raises(regard.InputError, match="params lacks q_weight"):
        regard.PixelAttention.from_params({k: v for k, v in GOOD.items() if k != "q_weight"}, 2, 2)


def test_compiles_without_a_graph_break():
    params = tensors(random_params(8, np.random.default_rng(0)), torch.float32)
    module = regard.PixelAttention.from_params(params, 4, 2)
    x = torch.randn(2, 8, 4, 4)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=2e-6)
    compiled(x).sum().backward()
    by_compiled = module.v_weight.grad.clone()
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(by_compiled, module.v_weight.grad, rtol=1e-4, atol=1e-5)
    function = torch.compile(regard.pixel_attention, fullgraph=True)
    torch.testing.assert_close(function(x, params, 4, 2), module(x), rtol=0, atol=2e-6)
