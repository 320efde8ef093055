"""No tolerance is chosen: tests compare by tests/judge.py, tests/close.py, or to the bit. What is written elsewhere is listed."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
COMPARING = {"approx", "allclose", "isclose", "assert_close"}
TOLERANCES = {"rtol", "atol", "rel", "abs", "rel_tol", "abs_tol"}
DEFINED = {"close.py", "judge.py"}

# What may write a tolerance of its own, since it is no rounding of a computation; and what it is instead.
ALLOWED = {
    "bench/test_timing.py::test_flops_are_those_of_the_matrix_products": "the side of a matrix is a whole number",
    "gpu/device/test_scan.py::test_another_scale_is_found": "float32 on a GPU, where float64 is no judge of its products",
    "gpu/device/test_scan.py::test_the_applied_scale": "so many roundings of the dtype",
    "gpu/device/test_watch.py::test_steps_and_microbatches_add_up": "float32 on a GPU",
    "explain/test_formulas.py::test_every_formula_gives_the_numbers_beside_it": "factors of a formula have three digits",
    "explain/test_formulas.py::test_far_is_far_enough_for_the_give": "a sample of 100,000, and the next term of a series",
    "lab/test_numbers.py::test_the_page_lists_them_with_sources": "numbers measured on another machine",
    "lab/test_real_heads.py::test_the_weights_are_those_the_model_shows": "a float32 model by two ways through it",
    "lab/test_training.py::test_adafactor_steps_are_relative_to_the_weight": "Adafactor clips and adds its own epsilon",
    "lab/test_training.py::test_the_last_row_has_the_loss_of_every_part": "two samples of windows",
    "page/test_data.py::alike": "a float32 model on another machine",
    "report/test_browser.py::test_the_map_shows_the_document_whatever_the_sign": "three or four significant digits",
    "report/test_browser.py::test_the_token_asked_for_is_shown_first": "two significant digits",
    "scan/test_health.py::test_the_largest_number_of_a_dtype_is_torchs": "a table of four digits",
    "scan/test_judged.py::test_a_fault_gives_other_numbers_than_its_right_twin": "a difference that must show",
    "scan/test_tracing.py::test_half_precision": "one rounding of bfloat16",
    "scan/test_tracing.py::test_the_predicted_spread_is_that_of_lengths_alone": "a sample of 2,048 rows",
    "scan/test_tracing.py::test_the_scale_is_the_same_in_every_mode": "autocast: one rounding of bfloat16",
    "scan/test_what_if.py::compare": "the tolerance of the tests below",
    "scan/test_what_if.py::test_as_a_model_whose_scale_is_another": "four models cast to float32 inside; a change that must show",
    "scan/test_what_if.py::test_every_way_to_write_it": "a change that must show",
    "scan/test_what_if_ends.py::test_half_precision": "a whole model in bfloat16",
    "watch/test_counting.py::test_autocast": "a whole model in bfloat16",
}


def tolerances(path):
    """Each function that writes one: its calls of a comparison of floats, or of anything with a tolerance."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in COMPARING or any(word.arg in TOLERANCES for word in node.keywords):
                    yield f"{path.relative_to(TESTS).as_posix()}::{function.name}"


def test_no_tolerance_is_chosen():
    files = [path for path in TESTS.rglob("*.py") if path.name not in DEFINED]
    assert len(files) > 100
    assert sorted({found for path in files for found in tolerances(path)}) == sorted(ALLOWED)
