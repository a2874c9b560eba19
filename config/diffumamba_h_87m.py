# Full-sequence DiffuMamba-H, 87M: tab:arch-87m, tab:key-hyperparameters.

out_dir = "out/diffumamba_h_87m"
data = "data/dclm"
tokenizer = "gpt2"              # 50,257 tokens and the mask

attn_every = 6                  # attention at layers 0 and 6, Mamba-2 at all others
seq_len = 8192
block_len = 8192                # the whole sequence is one block
n_layer = 12
n_head = 8                      # head dimension 56
d_model = 448
d_state = 64                    # Mamba-2 state size; 14 heads of 64, chunks of 128
mamba_head_dim = 64

batch_size = 32
max_iters = 19_074              # 32 x 8192 x 19,074 = 5.000B tokens
warmup_iters = 2000
learning_rate = 4e-3            # best of five by C4 perplexity, tab:validation-87m-full
init_std = embed_std = 0.02
micro_batch_size = 4            # 8 GPUs x 4 sequences; one GPU accumulates 8 micro-batches
eval_interval = 1000
eval_sequences = 64
log_interval = 10
