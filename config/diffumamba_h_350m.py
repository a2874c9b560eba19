# Full-sequence DiffuMamba-H, 350M: tab:arch-350m. The paper does not train it; its rule gives the rate.
from paper import transfer_lr

out_dir = "out/diffumamba_h_350m"
data = "data/dclm"
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 6                  # attention at layers 0, 6 and 12, Mamba-2 at all others
seq_len = 8192
block_len = 8192                # the whole sequence is one block
n_layer = 18
n_head = 14                     # head dimension 64
d_model = 896
d_state = 128                   # Mamba-2 state size; 28 heads of 64, chunks of 128
mamba_head_dim = 64

batch_size = 64
max_iters = 33_668              # 64 x 8192 x 33,668 = 17.65B tokens
warmup_iters = 2000
# From 87M at 4e-3: width 896/448, depth 18/12, batch 64/32, tokens 17.65B/5.000B.
learning_rate = transfer_lr(4e-3, 896 / 448, 18 / 12, 64 / 32, 17.65 / 5.000)
init_std = embed_std = 0.02
micro_batch_size = 8            # 8 GPUs x 8 sequences, the paper's setting
eval_interval = 1000
eval_sequences = 64
log_interval = 10
