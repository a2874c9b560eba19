# BDLM Mamba-H (block partial reverse), small.

out_dir = "out/small_mamba_h"
data = "data/novels"            # text of your own: python data.py text
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 6                  # attention at layers 0 and 6, Mamba-2 at all others
seq_len = 8192
block_len = 256
n_layer = 8
n_head = 4                      # head dimension 64
d_model = 256
d_state = 64                    # 8 Mamba-2 heads of 64

batch_size = 2
max_iters = 2500                # 2 x 8192 x 2500 = 41M tokens
warmup_iters = 150
learning_rate = 1e-3
init_std = embed_std = 0.02
eval_interval = 250
eval_sequences = 32
eval_samples = 1
log_interval = 50
