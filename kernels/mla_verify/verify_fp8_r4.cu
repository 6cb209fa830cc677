#include "kernel.cuh"

template int sm120::mla::launch<sm120::mla::Fp8Kv, 4>(const Args&, int, void*);
