# BDLM Mamba-H (block partial reverse), 350M: tab:arch-350m, tab:scaleup-350m.
from paper import transfer_lr

out_dir = "out/mamba_h_350m"
data = "data/dclm"
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 6                  # attention at layers 0, 6 and 12, Mamba-2 at all others
seq_len = 8192
block_len = 256
n_layer = 18
n_head = 16                     # head dimension 52
d_model = 832
d_state = 128                   # Mamba-2 state size; 26 heads of 64, chunks of 128
mamba_head_dim = 64

batch_size = 64
max_iters = 33_668              # 64 x 8192 x 33,668 = 17.65B tokens
warmup_iters = 2000
# From 87M at 8e-3: width 832/448, depth 18/12, batch 64/32, tokens 17.65B/5.000B.
learning_rate = transfer_lr(8e-3, 832 / 448, 18 / 12, 64 / 32, 17.65 / 5.000)
init_std = embed_std = 0.02
micro_batch_size = 8            # 8 GPUs x 8 sequences, the paper's setting
eval_interval = 1000
eval_sequences = 64
log_interval = 10
