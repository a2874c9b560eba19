"""
Everything that exists only for speed. The repository works without this folder, but runs slower.

  select             on a GPU, puts faster functions of the same signatures into ops.FAST
  training           Triton kernels: scan.py, conv.py, mixer.py (Mamba layers); FlexAttention: two_stream.py;
                     torch.compile: cross_entropy.py (head and loss)
  generation         inference.py prepares a model's weights, engine.py records steps as CUDA graphs on a GPU; Triton
                     kernels: scan_block.py, conv.py, cached_attention.py, step.py; block_ops.py: the engines'
                     operations
  mamba_ssm.py       another backend, as a check

Every kernel is tested against a plain twin.

    python -m tools.compare_ops                         times the operations beside libraries
    python -m pytest tests/kernels                      on a GPU, or in Triton's interpreter
"""
import ops


def select(device, training=True):
    """Fills ops.FAST for a CUDA device. Returns one line that names the kernels in use. If Triton cannot be imported,
    FAST stays empty and the line says why. training=False skips the operations that need torch.compile, which takes
    seconds to import: only training and evaluation use them."""
    try:
        from fast import cached_attention, conv, mixer, scan, scan_block, step
        if training:
            from fast import cross_entropy, two_stream
    except Exception as error:                          # a broken Triton fails in many ways
        return f"kernels: plain (no Triton: {type(error).__name__}: {error})"
    ops.FAST.update({
        # for whole sequences: training, and reading prompts
        "Mamba2.forward": mixer.mamba2_forward,         # its kernels run where gradients are wanted
        "Mamba2.project": mixer.mamba2_project,         # in the plain Mamba2.forward
        "ssd_scan": scan.ssd_scan, "causal_conv": conv.causal_conv, "gated_norm": mixer.gated_norm,
        # for single blocks: generation
        "cached_attention": cached_attention.cached_attention,
        "cached_attention_pairs": cached_attention.cached_attention,
        "scan_block": scan_block.scan_block, "causal_conv_both": conv.causal_conv_both, "add_norm": step.add_norm,
        "rotate_block": step.rotate_block,
        "uniform": step.uniform, "gumbel_argmax": step.gumbel_argmax, "unmask_and_advance": step.unmask_and_advance})
    if not training:
        return "kernels: Triton"
    ops.FAST.update({"two_stream_masks": two_stream.two_stream_masks, "linear_cross_entropy":
                     cross_entropy.linear_cross_entropy, "two_stream_attention": two_stream.two_stream_attention})
    if not two_stream.hopper(device):
        return "kernels: Triton; attention flex"
    why = two_stream.no_flash()
    attention = f"flex ({why}: pip install -r requirements-gpu.txt)" if why else "flash-attn-4"
    return f"kernels: Triton; attention {attention}"
