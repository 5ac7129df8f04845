// torch's CPU allocator, diverted for threads inside a memsaver region. Compiled against the installed torch.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <mutex>

namespace {

struct Shim {  // functions of shim.h, passed in so that both libraries share one table
    void* (*alloc)(int slot, size_t nbytes);
    int (*free_any)(void* address);
    int (*make_room)(int slot);  // Python's; returns whether to retry the allocation
};

Shim shim;
c10::Allocator* plain = nullptr;

struct Region {
    int slot;
    Region* outer;
    std::atomic<bool> open{true};  // any thread may end it
};

thread_local Region* innermost = nullptr;  // of this thread

// Returns the slot of this thread's innermost open region, -1 outside of all regions.
int current_slot() {
    while (innermost && !innermost->open) {
        Region* ended = innermost;
        innermost = ended->outer;
        delete ended;
    }
    return innermost ? innermost->slot : -1;
}

void leave_all_in_child() { innermost = nullptr; }  // savers are inert in a child

void delete_any(void* p) {
    if (p && !shim.free_any(p)) plain->raw_deleter()(p);
}

struct RegionAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        int slot = current_slot();
        if (slot < 0 || nbytes == 0) return plain->allocate(nbytes);
        void* p = shim.alloc(slot, nbytes);
        if (!p && shim.make_room(slot)) p = shim.alloc(slot, nbytes);
        TORCH_CHECK_WITH(OutOfMemoryError, p, "memsaver: no memory for ", nbytes, " bytes in the current region");
        return {p, p, &delete_any, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &delete_any; }
    void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};

RegionAllocator region_allocator;

}  // namespace

extern "C" void ms_hook_install(Shim functions) {
    static std::once_flag once;  // a second install would make the hook its own fallback
    std::call_once(once, [&] {
        shim = functions;
        plain = c10::GetCPUAllocator();
        c10::SetCPUAllocator(&region_allocator, /*priority=*/100);
        pthread_atfork(nullptr, nullptr, &leave_all_in_child);
    });
}

// Sends this thread's allocations to a slot until the returned region is left.
extern "C" void* ms_hook_enter(int slot) { return innermost = new Region{slot, innermost}; }

// Ends a region, in any thread and order. Allocations then go to the innermost region that is still open.
extern "C" void ms_hook_leave(void* region) {
    static_cast<Region*>(region)->open = false;
    current_slot();
}
