"""Private names of torch.

Three files do a piece of torch's own work again and reach the names of that piece themselves:
`core/private/torch_loader.py` (the iterator of a DataLoader), `sharding/_fsdp2.py` (FSDP2) and
`trainer/loops/_torch_fast_path.py` (backward and the step of an optimizer).
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.distributed import utils as distributed_utils
from torch.multiprocessing import reductions
from torch.nn.modules import batchnorm, dropout
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree
from torch.utils.data._utils import worker

BatchNorm = batchnorm._BatchNorm
DropoutNd = dropout._DropoutNd
DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
UnsupportedFakeTensorException = fake_tensor.UnsupportedFakeTensorException
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_flatten, tree_leaves = _pytree.tree_flatten, _pytree.tree_leaves
tree_map_only, tree_unflatten = _pytree.tree_map_only, _pytree.tree_unflatten
data_worker = worker
"""What runs in a process of a DataLoader's workers."""

# tensors
backward_hooks = attrgetter("_backward_hooks")
post_accumulate_grad_hooks = attrgetter("_post_accumulate_grad_hooks")
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
"""Called in a backward pass: calls a function at its end."""
foreach_add_: Any = torch._foreach_add_
foreach_copy_: Any = torch._foreach_copy_
foreach_div_: Any = torch._foreach_div_
foreach_mul_: Any = torch._foreach_mul_
foreach_norm: Any = torch._foreach_norm
cdata = attrgetter("_cdata")
"""Of a storage: what identifies its memory."""
StorageWeakRef = reductions.StorageWeakRef
make_wrapper_subclass = attrgetter("_make_wrapper_subclass")
is_dispatch_key_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
transforms_active: Any = torch._C._are_functorch_transforms_active
local_scalar_dense: Any = torch.ops.aten._local_scalar_dense
schema = attrgetter("_schema")
input_metadata = attrgetter("_input_metadata")
"""Of a node of autograd: shapes of what its operation has computed."""


def parametrizations_are_cached() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is open, in any thread."""
    return bool(parametrize._cache_enabled)


def storage_use_count(storage: Any) -> int:
    """Count what holds a storage.

    Raises:
        AttributeError: this version of torch has no such count.
    """
    return torch._C._storage_Use_Count(cdata(storage))


# modules
FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
apply = attrgetter("_apply")
forward_pre_hooks = attrgetter(FORWARD_PRE_HOOKS)
replicate_for_data_parallel = attrgetter("_replicate_for_data_parallel")
non_persistent_buffers = attrgetter("_non_persistent_buffers_set")
compiled_call_impl = attrgetter("_compiled_call_impl")
orig_mod = attrgetter("_orig_mod")


def dynamo_config() -> Any:
    """The options of torch.compile."""
    from torch._dynamo import config  # takes a second to import, and is there if a module is compiled

    return config


def clear_compile_rules() -> None:
    """Clear what torch.compile knows of functions, as a new process group does, if it was imported."""
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()


def not_compiling() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled inside the block; called in a dispatch mode, they would remain so."""
    is_used = "torch._dynamo" in sys.modules  # which takes a second to import
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()


# DistributedDataParallel and process groups
get_ddp_logging_data = attrgetter("_get_ddp_logging_data")
set_ddp_runtime_logging_sample_rate = attrgetter("_set_ddp_runtime_logging_sample_rate")
sync_buffers = attrgetter("_sync_buffers")
rebuild_buckets = attrgetter("_rebuild_buckets")
inside_ddp_forward = attrgetter("_inside_ddp_forward")
pre_forward, post_forward = attrgetter("_pre_forward"), attrgetter("_post_forward")
root_copy_hook = attrgetter("_root_copy_hook")
get_backend = attrgetter("_get_backend")
sync_module_states: Any = distributed_utils._sync_module_states

# torch's agent
join_procs_with_timeout = attrgetter("_join_procs_with_timeout")
registry = attrgetter("_registry")

# torch.utils.tensorboard
get_file_writer = attrgetter("_get_file_writer")
