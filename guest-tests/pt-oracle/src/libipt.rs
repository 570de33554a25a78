//! Intel's libipt. Its calls are foreign functions, so that this module is one of those with `unsafe`; no pointer of theirs leaves it.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// `struct pt_config`, of which only the trace and the clocks are used here; all else is zero: no errata.
#[repr(C)]
struct Config {
    size: usize,
    begin: *mut u8,
    end: *mut u8,
    callback: usize,
    context: usize,
    cpu: [u8; 8],
    errata: [u32; 16],
    cpuid_15_eax: u32,
    cpuid_15_ebx: u32,
    mtc_freq: u8,
    nom_freq: u8,
    flags: [u32; 5],
    addr_filter: [u64; 17],
}

const _: () = {
    assert!(size_of::<Config>() == 280);
    assert!(std::mem::offset_of!(Config, cpuid_15_eax) == 112);
    assert!(std::mem::offset_of!(Config, flags) == 124);
    assert!(std::mem::offset_of!(Config, addr_filter) == 144);
    assert!(size_of::<RawPacket>() == 24);
    assert!(size_of::<RawInsn>() == 40);
    assert!(size_of::<RawBlock>() == 48);
};

/// `struct pt_packet`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawPacket {
    kind: c_int,
    size: u8,
    payload: [u64; 2],
}

/// `struct pt_insn`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawInsn {
    ip: u64,
    isid: c_int,
    mode: c_int,
    class: c_int,
    raw: [u8; 15],
    size: u8,
    flags: u32,
}

/// `struct pt_block`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawBlock {
    ip: u64,
    end_ip: u64,
    isid: c_int,
    mode: c_int,
    class: c_int,
    ninsn: u16,
    raw: [u8; 15],
    size: u8,
    flags: u16,
}

/// `struct pt_event`: type and flags, time, lost packets, two reserved words, and from word 5 on what the type has to say.
type RawEvent = [u64; 8];

/// What of the trace is about more than which instructions ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// PTWRITE.
    PtWrite {
        /// The instruction, where a FUP tells it.
        ip: Option<u64>,
        /// 4 or 8 bytes.
        size: u8,
        /// The operand.
        value: u64,
    },
    /// EXSTOP.
    Stopped {
        /// The instruction, where a FUP tells it.
        ip: Option<u64>,
    },
    /// MWAIT.
    Mwait {
        /// EAX.
        hints: u32,
        /// ECX.
        extensions: u32,
    },
    /// PWRE.
    PowerEntry {
        /// Resolved thread C-state.
        state: u8,
        /// Resolved thread sub C-state.
        sub_state: u8,
        /// The hardware's own doing.
        hardware: bool,
    },
    /// PWRX.
    PowerExit {
        /// Core C-state at the wake.
        last: u8,
        /// The deepest.
        deepest: u8,
        /// By an external interrupt.
        interrupt: bool,
        /// By a store to the monitored address.
        store: bool,
    },
    /// TIP.PGE.
    Enabled {
        /// Where.
        ip: u64,
    },
    /// TIP.PGD, or the end of the trace by FUP and TIP.PGD.
    Disabled,
    /// An interrupt, an exception or the like.
    Async {
        /// The instruction that was not executed.
        from: u64,
        /// Where execution went.
        to: u64,
    },
    /// MOV to CR3, a far transfer that loads it, or what a PSB says of it.
    Paging {
        /// CR3 without bits 4:0.
        cr3: u64,
    },
    /// Any other, by its number in `enum pt_event_type`.
    Other(i32),
}

impl Event {
    fn of(raw: &RawEvent) -> Event {
        let (kind, flags) = (raw[0] as i32, (raw[0] >> 32) as u32);
        let ip = (flags & 1 == 0).then_some(raw[5]);
        let [.., first, second, third] = *raw;
        match kind {
            0 => Event::Enabled { ip: first },
            1 | 2 => Event::Disabled,
            3 => Event::Async {
                from: first,
                to: second,
            },
            4 | 5 => Event::Paging { cr3: first },
            12 => Event::Stopped { ip },
            13 => Event::Mwait {
                hints: second as u32,
                extensions: (second >> 32) as u32,
            },
            14 => Event::PowerEntry {
                state: first as u8,
                sub_state: (first >> 8) as u8,
                hardware: first >> 32 & 1 != 0,
            },
            15 => Event::PowerExit {
                last: first as u8,
                deepest: (first >> 8) as u8,
                interrupt: first >> 32 & 1 != 0,
                store: first >> 33 & 1 != 0,
            },
            16 => Event::PtWrite {
                ip,
                size: second as u8,
                value: third,
            },
            other => Event::Other(other),
        }
    }
}

/// What libipt's instruction flow decoder gives, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// An instruction ran at this address.
    Instruction(u64),
    /// Something else happened; a time stamp is no event here.
    Event(Event),
}

#[link(name = "ipt")]
unsafe extern "C" {
    fn pt_errstr(code: c_int) -> *const c_char;
    fn pt_pkt_alloc_decoder(config: *const Config) -> *mut c_void;
    fn pt_pkt_free_decoder(decoder: *mut c_void);
    fn pt_pkt_sync_forward(decoder: *mut c_void) -> c_int;
    fn pt_pkt_get_offset(decoder: *const c_void, offset: *mut u64) -> c_int;
    fn pt_pkt_next(decoder: *mut c_void, packet: *mut RawPacket, size: usize) -> c_int;
    fn pt_insn_alloc_decoder(config: *const Config) -> *mut c_void;
    fn pt_insn_free_decoder(decoder: *mut c_void);
    fn pt_insn_sync_forward(decoder: *mut c_void) -> c_int;
    fn pt_insn_get_offset(decoder: *const c_void, offset: *mut u64) -> c_int;
    fn pt_insn_set_image(decoder: *mut c_void, image: *mut c_void) -> c_int;
    fn pt_insn_next(decoder: *mut c_void, insn: *mut RawInsn, size: usize) -> c_int;
    fn pt_insn_event(decoder: *mut c_void, event: *mut RawEvent, size: usize) -> c_int;
    fn pt_blk_alloc_decoder(config: *const Config) -> *mut c_void;
    fn pt_blk_free_decoder(decoder: *mut c_void);
    fn pt_blk_sync_forward(decoder: *mut c_void) -> c_int;
    fn pt_blk_get_offset(decoder: *const c_void, offset: *mut u64) -> c_int;
    fn pt_blk_set_image(decoder: *mut c_void, image: *mut c_void) -> c_int;
    fn pt_blk_next(decoder: *mut c_void, block: *mut RawBlock, size: usize) -> c_int;
    fn pt_blk_event(decoder: *mut c_void, event: *mut RawEvent, size: usize) -> c_int;
    fn pt_iscache_alloc(name: *const c_char) -> *mut c_void;
    fn pt_iscache_set_limit(cache: *mut c_void, limit: u64) -> c_int;
    fn pt_iscache_free(cache: *mut c_void);
    fn pt_iscache_add_file(cache: *mut c_void, file: *const c_char, offset: u64, size: u64, vaddr: u64) -> c_int;
    fn pt_image_alloc(name: *const c_char) -> *mut c_void;
    fn pt_image_free(image: *mut c_void);
    fn pt_image_add_cached(image: *mut c_void, cache: *mut c_void, isid: c_int, asid: *const c_void) -> c_int;
}

/// Of `struct pt_conf_flags`.
const END_ON_CALL: u32 = 1;
const END_ON_JUMP: u32 = 1 << 2;

const EVENT_PENDING: c_int = 1;
const END_OF_TRACE: c_int = 4;
const PTE_NOMEM: c_int = 9;
const PTE_EOS: c_int = 7;

/// An error of libipt, and where in the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The decoder's offset.
    pub offset: u64,
    /// The address of the last instruction.
    pub ip: u64,
    /// What libipt says.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "libipt at offset {:#x}, ip {:#x}: {}",
            self.offset, self.ip, self.message
        )
    }
}

impl std::error::Error for Error {}

fn message(status: c_int) -> String {
    // SAFETY: the function takes any number and gives a static string, or null.
    let text = unsafe { pt_errstr(-status) };
    if text.is_null() {
        return format!("error {status}");
    }
    // SAFETY: it is not null, hence a static C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn config(trace: &[u8]) -> Config {
    let range = trace.as_ptr_range();
    Config {
        size: size_of::<Config>(),
        begin: range.start.cast_mut(),
        end: range.end.cast_mut(),
        callback: 0,
        context: 0,
        cpu: [0; 8],
        errata: [0; 16],
        cpuid_15_eax: 1,
        cpuid_15_ebx: 1,
        mtc_freq: 0,
        nom_freq: 0,
        flags: [0; 5],
        addr_filter: [0; 17],
    }
}

/// A packet as libipt has it: the type's number in `enum pt_packet_type`, and the 16 bytes of the payload's union.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Where it begins.
    pub offset: u64,
    /// Its type.
    pub kind: i32,
    /// Its size in bytes.
    pub size: u8,
    /// Its payload.
    pub payload: [u64; 2],
}

/// All packets from the first PSB on.
///
/// # Errors
///
/// What libipt does not take for a packet.
pub fn packets(trace: &[u8]) -> Result<Vec<Packet>, Error> {
    let config = config(trace);
    // SAFETY: the configuration is whole, and the trace that it points to outlives the decoder, which only reads it.
    let decoder = unsafe { pt_pkt_alloc_decoder(&config) };
    assert!(!decoder.is_null(), "libipt has no memory");
    let mut found = Vec::new();
    let mut offset = 0;
    let fail = |offset, status| match status {
        status if status == -PTE_EOS => Ok(()),
        status => Err(Error {
            offset,
            ip: 0,
            message: message(status),
        }),
    };
    // SAFETY: the decoder was allocated above and is freed below.
    let mut status = unsafe { pt_pkt_sync_forward(decoder) };
    while status >= 0 {
        let mut packet = RawPacket::default();
        // SAFETY: as above; the packet has the size that is passed.
        status = unsafe {
            pt_pkt_get_offset(decoder, &mut offset);
            pt_pkt_next(decoder, &mut packet, size_of::<RawPacket>())
        };
        if status >= 0 {
            found.push(Packet {
                offset,
                kind: packet.kind,
                size: packet.size,
                payload: packet.payload,
            });
        }
    }
    // SAFETY: as above, and it is not used any more.
    unsafe { pt_pkt_free_decoder(decoder) };
    fail(offset, status).map(|()| found)
}

/// Bytes of sections that stay mapped, together with what libipt knows of their code.
const MAPPED: u64 = 256 << 20;

/// Code for libipt: sections in files, which it maps, in a section cache.
#[derive(Debug)]
pub struct Image {
    image: *mut c_void,
    cache: *mut c_void,
    files: Vec<PathBuf>,
}

impl Image {
    /// An image of sections, each with its address. Their bytes go to temporary files.
    pub fn new<'a>(sections: impl IntoIterator<Item = (u64, &'a [u8])>) -> Image {
        // SAFETY: a null name is allowed.
        let (image, cache) = unsafe { (pt_image_alloc(ptr::null()), pt_iscache_alloc(ptr::null())) };
        assert!(!image.is_null() && !cache.is_null(), "libipt has no memory");
        // SAFETY: the cache was allocated above.
        let status = unsafe { pt_iscache_set_limit(cache, MAPPED) };
        assert!(status >= 0, "libipt does not take a limit: {}", message(status));
        let mut own = Image {
            image,
            cache,
            files: Vec::new(),
        };
        for (ip, bytes) in sections {
            own.add(ip, bytes, None);
        }
        own
    }

    /// Adds a section over what is there: of one address space (CR3 without bits 4:0), or of all.
    ///
    /// # Panics
    /// When libipt does not take it.
    pub fn add(&mut self, address: u64, bytes: &[u8], cr3: Option<u64>) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // One file each: libipt does not take a file that has grown since.
        let path = std::env::temp_dir().join(format!("pt-oracle-{}-{number}", std::process::id()));
        std::fs::write(&path, bytes).expect("room for a temporary file");
        self.add_file(&path, 0, bytes.len() as u64, address, cr3);
        self.files.push(path);
    }

    /// Adds a part of a file at an address, over what is there: of one address space (CR3 without bits 4:0), or of all.
    ///
    /// # Panics
    /// When libipt does not take it.
    pub fn add_file(&mut self, path: &Path, offset: u64, len: u64, address: u64, cr3: Option<u64>) {
        let name = CString::new(path.as_os_str().as_bytes()).expect("a path without NUL");
        // `struct pt_asid`: its size, CR3 and VMCS base, where all ones are for any.
        let asid = [24, cr3.unwrap_or(u64::MAX), u64::MAX];
        // SAFETY: image and cache are allocated; the name is a C string and the ASID whole, and libipt copies both.
        let status = unsafe {
            match pt_iscache_add_file(self.cache, name.as_ptr(), offset, len, address) {
                isid if isid > 0 => pt_image_add_cached(self.image, self.cache, isid, asid.as_ptr().cast()),
                status => status.min(-PTE_NOMEM),
            }
        };
        assert!(status >= 0, "libipt does not take a section: {}", message(status));
    }
}

// SAFETY: libipt keeps nothing by thread, and both allocations belong to this value alone.
unsafe impl Send for Image {}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: both were allocated by `new`, and no decoder outlives the borrow of the image that it works with.
        unsafe {
            pt_image_free(self.image);
            pt_iscache_free(self.cache);
        }
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Gives each instruction's address to `visit`, as libipt's instruction flow decoder finds them.
///
/// # Errors
///
/// Whatever it cannot decode.
pub fn instructions(trace: &[u8], image: &Image, mut visit: impl FnMut(u64)) -> Result<(), Error> {
    steps(trace, image, |step| {
        if let Step::Instruction(ip) = step {
            visit(ip);
        }
    })
}

/// The same with the events between them.
///
/// # Errors
///
/// Whatever it cannot decode.
pub fn steps(trace: &[u8], image: &Image, mut visit: impl FnMut(Step)) -> Result<(), Error> {
    let config = config(trace);
    // SAFETY: the configuration is whole, and the trace that it points to outlives the decoder, which only reads it.
    let decoder = unsafe { pt_insn_alloc_decoder(&config) };
    assert!(!decoder.is_null(), "libipt has no memory");
    // SAFETY: both are allocated, and the image outlives the decoder.
    let mut status = unsafe { pt_insn_set_image(decoder, image.image) };
    let mut insn = RawInsn::default();
    if status >= 0 {
        // SAFETY: the decoder is allocated.
        status = unsafe { pt_insn_sync_forward(decoder) };
    }
    while status >= 0 {
        if status & EVENT_PENDING != 0 {
            let mut event = RawEvent::default();
            // SAFETY: as above; the event has the size that is passed.
            status = unsafe { pt_insn_event(decoder, &mut event, size_of::<RawEvent>()) };
            if status >= 0 {
                visit(Step::Event(Event::of(&event)));
            }
        } else if status & END_OF_TRACE != 0 {
            break;
        } else {
            // SAFETY: as above; the instruction has the size that is passed.
            status = unsafe { pt_insn_next(decoder, &mut insn, size_of::<RawInsn>()) };
            if status >= 0 {
                visit(Step::Instruction(insn.ip));
            }
        }
    }
    let mut offset = 0;
    // SAFETY: as above, and the decoder is not used any more.
    unsafe {
        pt_insn_get_offset(decoder, &mut offset);
        pt_insn_free_decoder(decoder);
    }
    end(status, offset, insn.ip)
}

/// Instructions that were executed one after the other, as libipt's block decoder gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of the first.
    pub ip: u64,
    /// Address of the last.
    pub last: u64,
    /// How many.
    pub count: u16,
    /// 16, 32 or 64.
    pub bits: u32,
}

/// What libipt's block decoder gives, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Instructions ran.
    Block(Block),
    /// Something else happened.
    Event(Event),
}

/// Gives each block's first address and number of instructions to `visit`, as libipt's block decoder finds them.
///
/// # Errors
///
/// Whatever it cannot decode.
pub fn blocks(trace: &[u8], image: &Image, mut visit: impl FnMut(u64, u16)) -> Result<(), Error> {
    parts(config(trace), image, |part| {
        if let Part::Block(block) = part {
            visit(block.ip, block.count);
        }
    })
}

/// The same for blocks without a branch among them, with all that is known of them, and the events between them.
///
/// # Errors
///
/// Whatever it cannot decode.
pub fn straight(trace: &[u8], image: &Image, visit: impl FnMut(Part)) -> Result<(), Error> {
    let mut config = config(trace);
    config.flags[0] = END_ON_CALL | END_ON_JUMP;
    parts(config, image, visit)
}

fn parts(config: Config, image: &Image, mut visit: impl FnMut(Part)) -> Result<(), Error> {
    // SAFETY: the configuration is whole, and the trace that it points to outlives the decoder, which only reads it.
    let decoder = unsafe { pt_blk_alloc_decoder(&config) };
    assert!(!decoder.is_null(), "libipt has no memory");
    // SAFETY: both are allocated, and the image outlives the decoder.
    let mut status = unsafe { pt_blk_set_image(decoder, image.image) };
    let mut block = RawBlock::default();
    if status >= 0 {
        // SAFETY: the decoder is allocated.
        status = unsafe { pt_blk_sync_forward(decoder) };
    }
    while status >= 0 {
        if status & EVENT_PENDING != 0 {
            let mut event = RawEvent::default();
            // SAFETY: as above; the event has the size that is passed.
            status = unsafe { pt_blk_event(decoder, &mut event, size_of::<RawEvent>()) };
            if status >= 0 {
                visit(Part::Event(Event::of(&event)));
            }
        } else if status & END_OF_TRACE != 0 {
            break;
        } else {
            block.ninsn = 0;
            // SAFETY: as above; the block has the size that is passed.
            status = unsafe { pt_blk_next(decoder, &mut block, size_of::<RawBlock>()) };
            if block.ninsn > 0 {
                visit(Part::Block(Block {
                    ip: block.ip,
                    last: block.end_ip,
                    count: block.ninsn,
                    bits: 8 << block.mode,
                }));
            }
        }
    }
    let mut offset = 0;
    // SAFETY: as above, and the decoder is not used any more.
    unsafe {
        pt_blk_get_offset(decoder, &mut offset);
        pt_blk_free_decoder(decoder);
    }
    end(status, offset, block.end_ip)
}

fn end(status: c_int, offset: u64, ip: u64) -> Result<(), Error> {
    if status >= 0 || status == -PTE_EOS {
        return Ok(());
    }
    Err(Error {
        offset,
        ip,
        message: message(status),
    })
}
