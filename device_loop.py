"""
A loop whose end the device decides: a CUDA graph that runs a step, and then another again and again for as
long as masks are left. Decoders that reveal as many tokens as are sure enough need it: the host would have to
wait after every step to hear whether there is another.

PyTorch records the steps. The loop around them is a conditional node of CUDA 12.4, which PyTorch 2.11 cannot
make, so the driver is called here.

On a GPU:    python -m pytest tests/test_gpu.py -k loop
"""
import ctypes
from ctypes import byref

import torch

pointer = ctypes.c_void_p
CONDITIONAL, WHILE = 13, 1              # CU_GRAPH_NODE_TYPE_, CU_GRAPH_COND_TYPE_


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams of a conditional node: 256 bytes."""
    _fields_ = [("kind", ctypes.c_int), ("_reserved", ctypes.c_int * 3),
                ("handle", ctypes.c_uint64), ("type", ctypes.c_int), ("size", ctypes.c_uint),
                ("bodies", ctypes.POINTER(pointer)), ("context", pointer), ("_rest", ctypes.c_int64 * 26)]


def call(name, *args):
    """A function of the driver. RuntimeError where it lacks it or fails."""
    try:
        status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"this driver is older than CUDA 12.4 ({error})") from error
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {status}")


def append(graph, after, child):
    """Adds a recorded torch.cuda.CUDAGraph to a graph, after a node of it or None; its node."""
    node = pointer()
    call("cuGraphAddChildGraphNode", byref(node), graph, after and byref(after),
         ctypes.c_size_t(after is not None), pointer(child.raw_cuda_graph()))
    return node


class DeviceLoop:
    """
    first, step: torch.cuda.CUDAGraphs of what runs once and of what is repeated, made with keep_graph=True.
    check(handle) launches the kernel that says whether to go on, see kernels_draw.go_on; handle: an int64
    tensor on the device, 0 for no loop at all.
    """

    def __init__(self, first, step, check):
        self.graph, self.exec = pointer(), pointer()
        graph, context, handle = self.graph, pointer(), ctypes.c_uint64()
        call("cuCtxGetCurrent", byref(context))
        call("cuGraphCreate", byref(graph), 0)
        call("cuGraphConditionalHandleCreate", byref(handle), graph, context, 1, 1)
        self.handle = torch.tensor(handle.value, device="cuda")
        checked = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(checked):
            check(self.handle)
        self.parts = first, step, checked               # whose memory is in use
        node = append(graph, append(graph, None, first), checked)
        loop = NodeParams(kind=CONDITIONAL, handle=handle.value, type=WHILE, size=1, context=context)
        call("cuGraphAddNode_v2", byref(pointer()), graph, byref(node), None, ctypes.c_size_t(1), byref(loop))
        body = pointer(loop.bodies[0])
        append(body, append(body, None, step), checked)
        call("cuGraphInstantiateWithFlags", byref(self.exec), graph, ctypes.c_uint64(0))

    def launch(self):
        """Runs it on the current stream; the host does not wait."""
        call("cuGraphLaunch", self.exec, pointer(torch.cuda.current_stream().cuda_stream))

    def __del__(self):
        for name, made in (("cuGraphExecDestroy", self.exec), ("cuGraphDestroy", self.graph)):
            if made:
                getattr(ctypes.CDLL("libcuda.so.1"), name)(made)        # may fail when the process ends
