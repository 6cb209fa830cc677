// What a launch hands to the device: the caller's parameters and how the work is divided.
#pragma once

#include "config.h"
#include "sm120_mla.h"

namespace sm120::mla {

struct Args {
  sm120_mla_params p;
  Partition part;
  Workspace ws;
};

// One launcher per (KV type, row groups), each compiled in its own file.
template <typename Kv, int RowGroups>
int launch(const Args& args, int blocks, void* stream);

int launch_merge(const Args& args, void* stream);

}  // namespace sm120::mla
