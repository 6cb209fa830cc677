"""sglang-sm120: flash-MLA tree verify, DDTree and KV defragmentation for SGLang on sm_120 GPUs."""
