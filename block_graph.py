"""
All steps of a block as one CUDA graph, so that the host has nothing to do inside a block: so many steps, or as
many as it takes until no mask is left. Only the device knows when that is (a decoder may reveal whatever is sure
enough), and the host would have to wait after every step to ask it.

PyTorch records the steps. It cannot join recorded graphs, nor, in 2.11, make the conditional node of CUDA 12.4
that repeats one, so the driver is called here.

On a GPU:    python -m pytest tests/test_gpu.py -k "waits or asks or graphs_give"
"""
import ctypes
import functools
from ctypes import byref, c_size_t

import torch

pointer = ctypes.c_void_p
CONDITIONAL, WHILE = 13, 1              # CU_GRAPH_NODE_TYPE_, CU_GRAPH_COND_TYPE_


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node: 256 bytes."""
    _fields_ = [("kind", ctypes.c_int), ("_reserved", ctypes.c_int * 3),
                ("handle", ctypes.c_uint64), ("type", ctypes.c_int), ("size", ctypes.c_uint),
                ("bodies", ctypes.POINTER(pointer)), ("context", pointer), ("_rest", ctypes.c_int64 * 26)]


@functools.lru_cache(maxsize=None)
def driver():
    return ctypes.CDLL("libcuda.so.1")


def call(name, *args):
    """A function of the driver. RuntimeError where it lacks it or fails."""
    try:
        status = getattr(driver(), name)(*args)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver has no {name} ({error})") from error
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


def record(f, *args):
    """What f(*args) launches, as a graph that can be a part of others."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # A recording that fails leaves its own stream behind as the current one, hence the first.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        f(*args)
    return graph


def append(graph, children, node=None):
    """Adds recorded torch.cuda.CUDAGraphs to a graph, after a node of it if there is one; the last node."""
    for child in children:
        before, node = node, pointer()
        call("cuGraphAddChildGraphNode", byref(node), graph, before and byref(before), c_size_t(before is not None),
             pointer(child.raw_cuda_graph()))
    return node


class BlockGraph:
    """
    first, step: a block's first step and any other, by `record`, on the current device.
    times: how often the latter runs; None: again and again until check says that it is over. check(handle)
    launches the kernel that says so, see kernels_draw.go_on; handle: an int64 tensor on the device.
    """

    def __init__(self, first, step, times=None, check=None):
        self.graph, self.exec = pointer(), pointer()
        call("cuGraphCreate", byref(self.graph), 0)
        self.parts = [first, step]                      # whose memory is in use
        if times is None:
            self.loop(first, step, check)
        else:
            append(self.graph, [first] + times * [step])
        call("cuGraphInstantiateWithFlags", byref(self.exec), self.graph, ctypes.c_uint64(0))

    def loop(self, first, step, check):
        context, handle = pointer(), ctypes.c_uint64()
        call("cuCtxGetCurrent", byref(context))
        call("cuGraphConditionalHandleCreate", byref(handle), self.graph, context, 1, 1)
        self.handle = torch.tensor(handle.value, device="cuda")
        checked = record(check, self.handle)
        self.parts.append(checked)
        node = append(self.graph, [first, checked])
        loop = NodeParams(kind=CONDITIONAL, handle=handle.value, type=WHILE, size=1, context=context)
        call("cuGraphAddNode_v2", byref(pointer()), self.graph, byref(node), None, c_size_t(1), byref(loop))
        append(pointer(loop.bodies[0]), [step, checked])

    def launch(self):
        """Runs it on the current stream; the host does not wait."""
        call("cuGraphLaunch", self.exec, pointer(torch.cuda.current_stream().cuda_stream))

    def __del__(self):
        for name, made in (("cuGraphExecDestroy", self.exec), ("cuGraphDestroy", self.graph)):
            if made:
                getattr(driver(), name)(made)           # may fail when the process ends
