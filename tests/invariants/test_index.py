"""Where each invariant is kept, of those whose tests stand beside the code; 1, 2, 3, 7 and 11 have
modules here."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BESIDE_THE_CODE = {
    "4: a drafter gives the same drafts here and in vLLM": [
        "vllm/test_counts.py::test_counts_equal_vllms",  # with vLLM itself: make test-vllm
        "drafters/test_drafts.py::test_drafts_are_as_designed",
        "drafters/test_drafts.py::test_drafts_are_as_designed_in_little_room",
        "drafters/test_drafts.py::test_drafts_are_as_designed_after_acceptance",
    ],
    "5: a gradient of a partitioned sequence is that of the whole": [
        "train/test_partition.py::test_the_gradient_is_that_of_one_pass",
        "train/test_partition.py::test_padding_and_recomputing_do_not_change_the_gradient",
        "train/test_trainer.py::test_what_bounds_memory_does_not_change_the_gradient",
        "train/test_parallel.py::test_two_ranks_have_the_gradient_of_one",
    ],
    "6: every kernel equals its torch reference": [
        "ops/triton/test_compilation.py::test_kernels_compile_for_a_hopper_gpu",
        "ops/triton/test_cached_attention_kernel.py::test_attend",
        "ops/triton/test_hopper_attention_kernel.py::test_is_store_then_attend",
        "ops/triton/test_layer_chain_kernel.py::test_a_chain_equals_its_products",
        "ops/triton/test_quantized_kernels.py::test_a_product_of_few_bits",
        "ops/triton/test_quantized_kernels.py::test_experts",
        "ops/triton/test_moe_kernel.py::test_any_rows_and_experts",
        "ops/triton/test_delta_net_kernel.py::test_they_are_the_reference",
        "ops/triton/test_draft_kernel.py::test_drafts_are_drawn_as_the_twin_draws_them",
        "ops/triton/test_tree_kernel.py::test_rows_see_their_ancestors_alone",
        "ops/triton/test_divergence_kernel.py::test_loss_and_gradient_are_the_references",
    ],
    "8: an answer is read the same however it is cut, and ids that training reads were written": [
        "dialects/test_answers.py::test_an_answer_is_the_same_however_it_is_cut_into_chunks",
        "dialects/test_answers.py::"
        "test_whatever_is_written_is_read_alike_in_chunks_and_nothing_is_raised",
        "train/test_own_answers.py::test_whatever_a_target_writes_its_ids_say_its_message",
        "regenerate/test_token_ids.py::test_training_reads_what_the_target_was_shown_and_wrote",
    ],
    "9: speculation is never slower than none": [
        "engine/test_draft_length.py::test_a_drafter_that_is_hardly_ever_right_costs_nothing",
        "engine/test_draft_length.py::test_what_it_takes_a_drafter_to_catch_up_is_counted",
        "engine/test_pauses.py::test_a_cpu_drafts_where_that_is_faster",
    ],
    "10: a recurrent layer's state has the same bits whatever was drafted, cut or cached": [
        "ops/test_delta_net.py::test_state_and_results_have_the_same_bits_whatever_was_drafted",
        "ops/test_delta_net.py::test_a_text_may_be_cut_anywhere",
        "engine/test_recurrent_prefixes.py::test_a_chat_goes_on_from_its_last_prompt",
    ],
}


def test_each_is_in_the_index_or_has_a_module() -> None:
    modules = [path.name.split("_")[1] for path in Path(__file__).parent.glob("test_*_*.py")]
    found = [*modules, *(invariant.partition(":")[0] for invariant in BESIDE_THE_CODE)]
    assert sorted(map(int, found)) == list(range(1, 12))


@pytest.mark.parametrize("invariant", BESIDE_THE_CODE)
def test_its_tests_are_run_for_each_change(invariant: str) -> None:
    for test in BESIDE_THE_CODE[invariant]:
        place, _, name = test.partition("::")
        [found] = [
            part
            for part in ast.walk(ast.parse((TESTS / place).read_text()))
            if isinstance(part, ast.FunctionDef) and part.name == name
        ]
        assert "pytest.mark.nightly" not in map(ast.unparse, found.decorator_list)
