#include "kernel.cuh"

template int sm120::mla::launch<sm120::mla::Fp8Kv, 1>(const Args&, int, void*);
