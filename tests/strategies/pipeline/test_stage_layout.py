"""Where a layout puts parts, inputs, outputs and optimizer state; `meta` stands for a second device."""

import copy
import pickle
from typing import Any

import torch
from stage_modules import DeepNet
from torch import nn
from torchmetrics import MeanMetric

from evener.strategies.core.optimizer_states import state_to_parameters
from evener.strategies.pipeline.options import StageOptions
from evener.strategies.pipeline.stages import Stages

CPU, META = torch.device("cpu"), torch.device("meta")


def placed(devices: list[torch.device], **options: Any) -> tuple[DeepNet, Stages]:
    module = DeepNet()
    module.metric = MeanMetric()
    layout = Stages(devices, StageOptions(**options))
    layout.place(module)
    return module, layout


def test_parts_go_to_their_devices_and_what_has_no_parameters_to_the_meeting_device() -> None:
    module, _ = placed([CPU, META], partition=["net.blocks.2"])  # meta is a device, too
    where = {name: str(p.device) for name, p in module.named_parameters() if name.endswith("weight")}
    assert where == {
        "net.enter.weight": "cpu",
        "net.blocks.0.linear.weight": "cpu",
        "net.blocks.1.linear.weight": "cpu",
        "net.blocks.2.linear.weight": "meta",
        "net.blocks.3.linear.weight": "meta",
        "net.leave.weight": "meta",
    }
    assert module.device == META
    assert module.metric.device == META
    assert module(torch.zeros(2, 4)).device == META


def test_outputs_meet_on_the_root_device_if_asked() -> None:
    module, layout = placed([META, CPU], output_device="first")
    assert (layout.meeting_device, module.device) == (META, META)


def test_optimizer_state_made_at_the_start_follows_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3, device=META))
    optimizer = torch.optim.Adagrad([parameter])  # makes its state when it is made
    optimizer.state[parameter]["sum"] = torch.ones(3)  # on the root device, where Lightning puts it
    state_to_parameters(optimizer)
    assert optimizer.state[parameter]["sum"].device == META
    assert optimizer.state[parameter]["step"].device == CPU


def test_a_copy_of_a_placed_module_computes_what_the_module_does() -> None:
    module, stages = placed([CPU, CPU])  # a callback that averages weights makes a copy when training begins
    x = torch.ones(2, 4)
    before = module(x)
    average = copy.deepcopy(module)
    stages.remove()
    with torch.no_grad():
        module.net.leave.weight.add_(1.0)
    assert torch.allclose(average(x), before)
    assert not torch.allclose(module(x), before)


def test_a_copy_of_a_placed_part_can_be_brought_to_another_process() -> None:
    module, stages = placed([CPU, CPU])
    copied = copy.deepcopy(module.net.enter)  # its hooks refer to the stages, which know the hooks of all parts
    x = torch.ones(2, module.net.enter.in_features)
    assert torch.allclose(pickle.loads(pickle.dumps(copied))(x), module.net.enter(x))
    stages.remove()  # the module's own hooks, still
    assert all(not part._forward_pre_hooks for part in module.modules())
