// torch's CPU allocator, with a detour for threads inside a memsaver region. Built against the torch in place.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <mutex>

namespace {

struct Shim {  // functions of shim.h, handed in so that both files share its one table
    void* (*alloc)(int slot, size_t nbytes);
    int (*free_any)(void* address);
};

Shim shim;
c10::Allocator* plain = nullptr;
thread_local int current_slot = -1;  // -1: outside every region

void delete_any(void* p) {
    if (p && !shim.free_any(p)) plain->raw_deleter()(p);
}

struct RegionAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        if (current_slot < 0 || nbytes == 0) return plain->allocate(nbytes);
        void* p = shim.alloc(current_slot, nbytes);
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
    });
}

// Sends this thread's allocations to a slot (-1: plain memory); returns where they went before.
extern "C" int ms_hook_enter(int slot) {
    int previous = current_slot;
    current_slot = slot;
    return previous;
}
