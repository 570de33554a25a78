//! What a program has one of: the allocator and the panic handler.

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicU64, Ordering};

/// Hands out the memory behind the image and never takes any back.
struct Heap(AtomicU64);

/// How much of it.
const SIZE: u64 = 64 << 20;

#[global_allocator]
static HEAP: Heap = Heap(AtomicU64::new(0));

// SAFETY: the counter only grows, so that no two pieces overlap, and what is behind the image belongs to nobody else.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let start = crate::label!(image_end);
        let mut now = self.0.load(Ordering::Relaxed);
        loop {
            let at = (start + now).next_multiple_of(layout.align() as u64);
            let end = at + layout.size() as u64 - start;
            if end > SIZE {
                return core::ptr::null_mut();
            }
            match self.0.compare_exchange(now, end, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) => return at as *mut u8,
                Err(other) => now = other,
            }
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    crate::report::failed(info)
}

// What the compiler calls and a C library would have. In assembly, since the compiler makes calls of these of loops that do the same.
core::arch::global_asm!(
    r#"
    .text
    .globl  memcpy, memmove, memset, memcmp, bcmp, strlen
memmove:
    mov     rax, rdi
    sub     rax, rsi
    cmp     rax, rdx
    jae     memcpy
    # The target begins within the source: backwards.
    mov     rax, rdi
    mov     rcx, rdx
    lea     rdi, [rdi + rdx - 1]
    lea     rsi, [rsi + rdx - 1]
    std
    rep movsb
    cld
    ret
memcpy:
    mov     rax, rdi
    mov     rcx, rdx
    rep movsb
    ret
memset:
    mov     r9, rdi
    mov     eax, esi
    mov     rcx, rdx
    rep stosb
    mov     rax, r9
    ret
memcmp:
bcmp:
    xor     eax, eax
    mov     rcx, rdx
    test    rcx, rcx
    repe cmpsb
    je      2f
    movzx   eax, byte ptr [rdi - 1]
    movzx   ecx, byte ptr [rsi - 1]
    sub     ecx, eax
    mov     eax, ecx
2:  ret
strlen:
    mov     rax, -1
3:  inc     rax
    cmp     byte ptr [rdi + rax], 0
    jne     3b
    ret
"#
);
