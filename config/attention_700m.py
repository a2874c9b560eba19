# Full-sequence attention (MDLM), 700M: for throughput benchmarks with random weights.
# The paper gives only the size; the geometry is ours.

out_dir = "out/attention_700m"
data = "data/dclm"
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 1                  # attention in every layer
seq_len = 8192
block_len = 8192                # the whole sequence is one block
n_layer = 24
n_head = 18                     # head dimension 64
d_model = 1152

batch_size = 64
micro_batch_size = 4
max_iters = 1000                # untuned: the paper gives only the size; bench.py measures its speed
warmup_iters = 100
learning_rate = 1e-3
init_std = embed_std = 0.02
eval_interval = 1000
eval_sequences = 64
log_interval = 10
