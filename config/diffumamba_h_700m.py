# Full-sequence DiffuMamba-H, 700M: for throughput benchmarks with random weights.
# The paper gives only the size; the geometry is ours.

out_dir = "out/diffumamba_h_700m"
data = "data/dclm"
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 6                  # attention at layers 0, 6, 12 and 18, Mamba-2 at all others
seq_len = 8192
block_len = 8192                # the whole sequence is one block
n_layer = 24
n_head = 17                     # head dimension 64
d_model = 1088
d_state = 128                   # Mamba-2 state size; 34 heads of 64, chunks of 128
mamba_head_dim = 64

batch_size = 64
micro_batch_size = 4
max_iters = 1000                # untuned: the paper gives only the size; bench.py measures its speed
warmup_iters = 100
learning_rate = 1e-3
init_std = embed_std = 0.02
eval_interval = 1000
eval_sequences = 64
log_interval = 10
