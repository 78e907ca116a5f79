"""Reasons: why gossamer's class does not pass a test that DDP passes; by the test's name."""

HOOKS = "registers a communication hook of DDP's: an algorithm takes its place, and the call is refused"
BUFFER_HOOKS = "registers a hook for buffers: refused; `buffers=` chooses among broadcast, average and local"
REDUCER = "looks into DDP's reducer, which gossamer's class does not have"
LOGGED = "reads what DDP's reducer logs (`_get_ddp_logging_data`): here that is `metrics()`"
AGAIN = "wraps one module several times: refused until `close()` has ended the replica before"
UNUSED = "expects DDP's error about unused parameters: gossamer finds them always, and trains on"
STATIC = "expects DDP's error about `static_graph=True`: here any graph may change"
KIND = "expects a RuntimeError: the same case is refused with ConfigurationError, a ValueError"

REASONS: dict[str, str] = {
    "test_DistributedDataParallel_requires_grad": KIND,
    "test_accumulate_gradients_no_sync_allreduce_hook": HOOKS,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": HOOKS,
    "test_ddp_broadcast_buffer_via_hook": BUFFER_HOOKS,
    "test_ddp_broadcast_buffers_deprecation_warning": "expects a warning that `broadcast_buffers` is deprecated",
    "test_ddp_bucket_cap_mb_list": "reads the sizes of DDP's buckets: an algorithm chooses them",
    "test_ddp_buffer_hook_allreduce": BUFFER_HOOKS,
    "test_ddp_buffer_hook_allreduce_return_future": BUFFER_HOOKS,
    "test_ddp_comm_hook_logging": HOOKS,
    "test_ddp_control_flow_different_across_ranks": REDUCER,
    "test_ddp_control_flow_same_across_ranks": REDUCER,
    "test_ddp_create_graph": "`backward(create_graph=True)` is refused: the graph would lack the mean",
    "test_ddp_device_mesh_initialization": KIND,
    "test_ddp_hook_parity_allreduce": HOOKS,
    "test_ddp_hook_parity_allreduce_process_group": HOOKS,
    "test_ddp_hook_parity_post_localSGD": HOOKS,
    "test_ddp_hook_parity_powerSGD": HOOKS,
    "test_ddp_logging_data_cpu": LOGGED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": UNUSED,
    "test_ddp_multiple_nested_unused_params_error": UNUSED,
    "test_ddp_native_mixed_precision_ignored_params": "gives `mixed_precision=`, which is refused",
    "test_ddp_new_tensor_in_fwd": AGAIN,
    "test_ddp_new_tensor_in_fwd_static_graph": AGAIN,
    "test_ddp_profiling_torch_profiler": "counts DDP's all-reduces in a profile: exchanges have other names",
    "test_ddp_python_error_logged": HOOKS,
    "test_ddp_returns_tensor_with_no_grad": AGAIN,
    "test_ddp_static_graph_nested_types": "wraps a wrapped model: refused, as both would exchange the same gradients",
    "test_ddp_unused_params_rebuild_buckets_exception": UNUSED,
    "test_detect_ddp_is_actually_static": REDUCER,
    "test_different_graph_across_ranks": LOGGED,
    "test_invalid_static_graph": STATIC,
    "test_skip_all_reduce_unused_parameters": LOGGED,
    "test_static_graph_api_cpu": STATIC,
}

TOO_LONG: dict[str, str] = {"test_ddp_uneven_inputs": "DDP itself does not end it in 400 s on two processors"}
"""Tests that are not run, and why."""
