"""Tasks on which networks are grown: data in three parts, hosts in three sizes (too small, right, too large) and a loss.

task = load_task("digits")
host = task.make_host("starved", seed=0)
for inputs, targets in task.train_loader(seed=0):
    task.loss_fn(host(inputs), targets).backward()
task.evaluate(host, task.val_loader()).accuracy
"""

from esper.tasks.gpt_host import GPTBlock, GPTHost
from esper.tasks.hosts import FAMILIES, ConvBlock, ConvHost, MLPHost, ResidualBlock, ResidualHost
from esper.tasks.loader import BatchLoader, batch_bounds, shuffled_order
from esper.tasks.options import TaskError
from esper.tasks.registry import TASKS, TaskEntry, load_task
from esper.tasks.task import HOST_SIZES, Split, Task, TaskEvaluation, with_wrong_labels

__all__ = [
    "FAMILIES",
    "HOST_SIZES",
    "TASKS",
    "BatchLoader",
    "ConvBlock",
    "ConvHost",
    "GPTBlock",
    "GPTHost",
    "MLPHost",
    "ResidualBlock",
    "ResidualHost",
    "Split",
    "Task",
    "TaskEntry",
    "TaskError",
    "TaskEvaluation",
    "batch_bounds",
    "load_task",
    "shuffled_order",
    "with_wrong_labels",
]
