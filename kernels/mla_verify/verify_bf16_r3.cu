#include "kernel.cuh"

template int sm120::mla::launch<sm120::mla::Bf16Kv, 3>(const Args&, int, void*);
