#include "kernel.cuh"

template int sm120::mla::launch<sm120::mla::Bf16Kv, 6>(const Args&, int, void*);
