#include "kernel.cuh"

template int sm120::mla::launch<sm120::mla::Fp8Kv, 2>(const Args&, int, void*);
