//! bzImage, entered in 64-bit mode, or in 32-bit mode where that is all it has (Linux Documentation/arch/x86/boot.rst, "The Linux/x86 Boot Protocol").
//!
//! The low megabyte of the machine at entry:
//!
//! ```text
//! 00500  GDT: null, null, __BOOT_CS, __BOOT_DS
//! 07000  struct boot_params ("zero page")
//! 09000  page tables: PML4, PDPT, four page directories that map 4 GiB one to one with 2 MiB pages
//! 20000  the command line
//! E0000  the ACPI tables (see machine::acpi)
//! ```

use std::io::Cursor;

use linux_loader::{
    configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator},
    loader::{
        KernelLoader,
        bootparam::{boot_e820_entry, boot_params, setup_header},
        bzimage::BzImage,
    },
};
use vm_memory::{ByteValued, GuestAddress};

use super::{
    e820,
    image::{Boot, Entry, Input, LoadError, RAISE, le16, le32, size_text, too_big},
    initrd,
};
use crate::{
    loader::image::DEFAULT_LINUX_CMDLINE,
    memory::{Memory, NotRam},
};

/// The GDT's address.
const GDT: u64 = 0x500;
/// The address of `struct boot_params`.
const ZERO_PAGE: u64 = 0x7000;
/// The PML4's address; the PDPT and the page directories follow.
const PAGE_TABLES: u64 = 0x9000;
/// The command line's address.
pub(super) const CMDLINE: u64 = 0x2_0000;
/// The most that fits there, with its NUL.
pub(super) const CMDLINE_ROOM: u64 = 0x6_0000;

/// Where the setup header starts in the image and in `struct boot_params`.
const SETUP_HEADER: usize = 0x1f1;
/// The magic "HdrS".
const HDRS: usize = 0x202;
/// The end of the setup header as of protocol 2.15, and so the least an image of a protocol we take can have.
pub(super) const HEADER_END: usize = 0x26c;

/// `loadflags` bit 0: the protected-mode code is loaded at 1 MiB, not at 64 KiB.
const LOADED_HIGH: u8 = 1 << 0;
/// `xloadflags` bit 0: there is a 64-bit entry point at 0x200.
const XLF_KERNEL_64: u16 = 1 << 0;
/// `type_of_loader`: a loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;
/// `vid_mode`: normal.
const VID_NORMAL: u16 = 0xffff;

/// Selectors that the 64-bit boot protocol asks for: `__BOOT_CS` and `__BOOT_DS`.
pub const BOOT_CS: u16 = 0x10;
/// See [`BOOT_CS`].
pub const BOOT_DS: u16 = 0x18;
/// Null, null, 64-bit code, flat data: type, S, P, L or D/B, G as SDM Vol. 3A 3.4.5 "Segment Descriptors" lays them out.
const GDT_ENTRIES: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

const GDT_LIMIT: u16 = (GDT_ENTRIES.len() * 8 - 1) as u16;
/// The same for the 32-bit boot protocol: its code segment is one of 32 bits.
const GDT_ENTRIES_32: [u64; 4] = [0, 0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Page-table entry bits (SDM Vol. 3A 4.5 "4-Level Paging and 5-Level Paging").
const PRESENT_WRITABLE: u64 = 0b11;
const PAGE_SIZE: u64 = 1 << 7;

/// True if the file says it is a bzImage.
pub fn is_bzimage(kernel: &[u8]) -> bool {
    kernel.get(HDRS..HDRS + 4) == Some(b"HdrS")
}

/// What the setup header says, checked against the file.
#[derive(Clone, Copy, Debug)]
struct Header {
    /// Where the protected-mode part ends in the file.
    file_end: usize,
    /// Where to load it.
    load: u64,
    /// How much memory it needs from there on before it reads the memory map.
    need: u64,
    /// The longest command line, without its NUL.
    cmdline_max: u64,
    /// The highest address the initial RAM disk may occupy.
    initrd_max: u64,
    /// The end of the header in the image: fields after it are not this kernel's.
    header_end: usize,
    /// There is a 64-bit entry point.
    wide: bool,
}

impl Header {
    fn parse(kernel: &[u8]) -> Result<Self, LoadError> {
        let have = kernel.len() as u64;
        let header_cut = LoadError::Truncated {
            what: "the bzImage header",
            need: HEADER_END as u64,
            have,
        };
        if kernel.len() < HEADER_END {
            return Err(header_cut);
        }
        let byte = |at: usize| kernel.get(at).copied().ok_or(header_cut.clone());
        let word = |at| le16(kernel, at).ok_or(header_cut.clone());
        let long = |at| le32(kernel, at).ok_or(header_cut.clone());

        let version = word(0x206)?;
        if word(0x1fe)? != 0xaa55 {
            return Err(LoadError::DamagedKernel(
                "no boot flag AA55H at 1FEH, though the bzImage magic is there".into(),
            ));
        }
        if version < 0x20c {
            let (major, minor) = (version >> 8, version & 0xff);
            let text = format!("boot protocol {major}.{minor:02}, and 2.12 is the oldest that is known here");
            return Err(LoadError::UnusableKernel(text));
        }
        if byte(0x211)? & LOADED_HIGH == 0 {
            return Err(LoadError::UnusableKernel(
                "a zImage, which loads below 1 MiB; give the bzImage".into(),
            ));
        }
        // "For backwards compatibility, if the setup_sects field contains 0, the real value is 4."
        let setup_sects = match byte(SETUP_HEADER)? {
            0 => 4,
            n => usize::from(n),
        };
        let setup_end = (setup_sects + 1) * 512;
        let payload = u64::from(long(0x1f4)?) * 16;
        if payload <= 0x200 {
            return Err(LoadError::DamagedKernel(
                "its header says it has no protected-mode code".into(),
            ));
        }
        let file_end = setup_end as u64 + payload;
        // The length counts paragraphs of 16 bytes, and not every linker fills the last one.
        if file_end - 15 > have {
            return Err(LoadError::Truncated {
                what: "the kernel",
                need: file_end,
                have,
            });
        }
        let load = match u64::from(long(0x258)?) | u64::from(long(0x25c)?) << 32 {
            0 => e820::EXTENDED_START,
            preferred => preferred,
        };
        if load < e820::EXTENDED_START || load % 4096 != 0 {
            return Err(LoadError::DamagedKernel(format!("it wants to be loaded at {load:#x}")));
        }
        Ok(Header {
            file_end: file_end.min(have) as usize,
            load,
            need: payload.max(u64::from(long(0x260)?)),
            cmdline_max: u64::from(long(0x238)?).min(CMDLINE_ROOM - 1),
            initrd_max: u64::from(long(0x22c)?),
            // The jump at 0x200 skips the header, so its displacement tells the header's length.
            header_end: (HDRS + usize::from(byte(0x201)?)).min(HEADER_END),
            wide: word(0x236)? & XLF_KERNEL_64 != 0,
        })
    }
}

/// Loads a bzImage, its command line and its initial RAM disk, and writes what its entry point expects: the 64-bit one if it has
/// that.
pub fn load(memory: &Memory, boot: &Boot) -> Result<Entry, (Input, LoadError)> {
    let kernel_error = |e| (Input::Kernel, e);
    let header = Header::parse(boot.kernel).map_err(kernel_error)?;
    let end = header
        .load
        .checked_add(header.need)
        .filter(|end| *end <= memory.low_end());
    let end = end.ok_or_else(|| {
        let need = header.load.saturating_add(header.need);
        kernel_error(too_big("the kernel", need, memory))
    })?;

    let cmdline = boot.cmdline.unwrap_or(DEFAULT_LINUX_CMDLINE.as_bytes());
    if cmdline.len() as u64 > header.cmdline_max {
        let error = LoadError::CmdlineTooLong {
            have: cmdline.len() as u64,
            max: header.cmdline_max,
        };
        return Err((Input::Cmdline, error));
    }

    initrd::check_parts(boot.modules)?;
    let initrd = match initrd::joined_len(boot.modules) {
        None => None,
        Some(len) => {
            let address =
                place_initrd(memory, &header, end, len).map_err(|e| (initrd::last_module(boot.modules), e))?;
            Some((address, len))
        }
    };

    let damaged = |e: &dyn std::fmt::Display| kernel_error(LoadError::DamagedKernel(e.to_string()));
    let mut image = Cursor::new(&boot.kernel[..header.file_end]);
    let loaded =
        BzImage::load(memory.mmap(), Some(GuestAddress(header.load)), &mut image, None).map_err(|e| damaged(&e))?;
    let Some(setup) = loaded.setup_header else {
        return Err(damaged(&"no setup header"));
    };

    let not_ram = |e| kernel_error(LoadError::from(e));
    memory.write(CMDLINE, cmdline).map_err(not_ram)?;
    memory.write(CMDLINE + cmdline.len() as u64, &[0]).map_err(not_ram)?;
    if let Some((address, _)) = initrd {
        initrd::write_joined(memory, address, boot.modules).map_err(not_ram)?;
    }
    write_zero_page(memory, setup, header.header_end, initrd, boot.rsdp).map_err(kernel_error)?;
    if header.wide {
        write_tables(memory).map_err(kernel_error)?;
        return Ok(entry_64(header.load + 0x200));
    }
    write_quads(memory, GDT, &mut GDT_ENTRIES_32.into_iter()).map_err(not_ram)?;
    Ok(Entry::Linux32 {
        // Below the end of memory below 4 GiB.
        eip: header.load as u32,
        boot_params: ZERO_PAGE as u32,
        gdt: GDT,
        gdt_limit: GDT_LIMIT,
    })
}

/// The 64-bit entry point with what [`write_tables`] has written.
pub(super) fn entry_64(rip: u64) -> Entry {
    Entry::Linux64 {
        rip,
        boot_params: ZERO_PAGE,
        cr3: PAGE_TABLES,
        gdt: GDT,
        gdt_limit: GDT_LIMIT,
    }
}

/// As high as RAM and the kernel allow, so that it is out of the way of the kernel while that unpacks itself.
fn place_initrd(memory: &Memory, header: &Header, kernel_end: u64, len: u64) -> Result<u64, LoadError> {
    let top = memory.low_end().min(header.initrd_max + 1);
    let address = top
        .checked_sub(len)
        .map(|start| start & !4095)
        .filter(|start| *start >= kernel_end);
    address.ok_or_else(|| {
        let below = memory.low_end() <= header.initrd_max;
        let room = top.saturating_sub(kernel_end);
        LoadError::TooBig {
            what: "the initial RAM disk",
            need: size_text(len),
            have: format!("{}M above the kernel", room >> 20),
            advice: if below {
                RAISE
            } else {
                "this kernel takes no larger one"
            },
        }
    })
}

/// Writes `struct boot_params` around a setup header that ends at `header_end` in its image.
pub(super) fn write_zero_page(
    memory: &Memory,
    setup: setup_header,
    header_end: usize,
    initrd: Option<(u64, u64)>,
    rsdp: u64,
) -> Result<(), LoadError> {
    let mut params = boot_params {
        hdr: setup,
        acpi_rsdp_addr: rsdp,
        ..Default::default()
    };
    // Fields beyond this kernel's own header are whatever follows it in the file.
    params.as_mut_slice()[header_end..HEADER_END].fill(0);
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.vid_mode = VID_NORMAL;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    if let Some((address, len)) = initrd {
        // Both are below 4 GiB, as the low end of memory is.
        params.hdr.ramdisk_image = address as u32;
        params.hdr.ramdisk_size = len as u32;
    }
    let map = e820::map(memory);
    let mut table = params.e820_table;
    for (slot, entry) in table.iter_mut().zip(&map) {
        let size = entry.range.end - entry.range.start;
        *slot = boot_e820_entry {
            addr: entry.range.start,
            size,
            r#type: entry.kind as u32,
        };
    }
    params.e820_table = table;
    params.e820_entries = map.len() as u8;
    let params = BootParams::new::<boot_params>(&params, GuestAddress(ZERO_PAGE));
    LinuxBootConfigurator::write_bootparams(&params, memory.mmap()).map_err(|e| LoadError::DamagedKernel(e.to_string()))
}

/// Writes 64-bit words from an address on.
fn write_quads(memory: &Memory, at: u64, entries: &mut dyn Iterator<Item = u64>) -> Result<(), NotRam> {
    let bytes: Vec<u8> = entries.flat_map(u64::to_le_bytes).collect();
    memory.write(at, &bytes)
}

/// Writes the GDT and the page tables of the 64-bit boot protocol.
pub(super) fn write_tables(memory: &Memory) -> Result<(), LoadError> {
    write_quads(memory, GDT, &mut GDT_ENTRIES.into_iter())?;
    let (pdpt, directories) = (PAGE_TABLES + 0x1000, PAGE_TABLES + 0x2000);
    write_quads(memory, PAGE_TABLES, &mut std::iter::once(pdpt | PRESENT_WRITABLE))?;
    let pointers = &mut (0..4).map(|n| (directories + n * 0x1000) | PRESENT_WRITABLE);
    write_quads(memory, pdpt, pointers)?;
    let pages = &mut (0..4 * 512).map(|n| (n << 21) | PAGE_SIZE | PRESENT_WRITABLE);
    write_quads(memory, directories, pages)?;
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::loader::{
        Module,
        tests::{boot, module},
    };

    /// A bzImage with everything in place and `payload` bytes (a multiple of 16) of code, each the low byte of its offset.
    pub(crate) fn bzimage(payload: usize) -> Vec<u8> {
        let mut image = vec![0; 5 * 512];
        image[0x1f1] = 4;
        image[0x1f4..0x1f8].copy_from_slice(&((payload / 16) as u32).to_le_bytes());
        image[0x1fe..0x202].copy_from_slice(&[0x55, 0xaa, 0xeb, 0x6a]);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        image[0x211] = LOADED_HIGH;
        image[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
        image[0x22c..0x230].copy_from_slice(&0x7fff_ffffu32.to_le_bytes());
        image[0x230..0x234].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image[0x234] = 1;
        image[0x236..0x238].copy_from_slice(&XLF_KERNEL_64.to_le_bytes());
        image[0x238..0x23c].copy_from_slice(&2047u32.to_le_bytes());
        image[0x258..0x260].copy_from_slice(&0x100_0000u64.to_le_bytes());
        image[0x260..0x264].copy_from_slice(&0x20_0000u32.to_le_bytes());
        image.extend((0..payload).map(|n| n as u8));
        image
    }

    fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut image = bzimage(4096);
        image[at..at + bytes.len()].copy_from_slice(bytes);
        image
    }

    // covers: loader/bzimage-32
    #[test]
    fn a_kernel_without_a_64_bit_entry_point_is_entered_at_its_32_bit_one() {
        let memory = Memory::new(64 << 20).unwrap();
        let entry = load(&memory, &boot(&patched(0x236, &[0]))).unwrap();
        let expected = Entry::Linux32 {
            eip: 0x100_0000,
            boot_params: ZERO_PAGE as u32,
            gdt: GDT,
            gdt_limit: 31,
        };
        assert_eq!(entry, expected);
        // __BOOT_CS is flat 32-bit code, __BOOT_DS flat data.
        assert_eq!(u64::from_le_bytes(read(&memory, GDT + 16)), 0x00cf_9b00_0000_ffff);
        assert_eq!(u64::from_le_bytes(read(&memory, GDT + 24)), 0x00cf_9300_0000_ffff);
        assert_eq!(read::<4>(&memory, ZERO_PAGE + 0x228), (CMDLINE as u32).to_le_bytes());
    }

    fn read<const N: usize>(memory: &Memory, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory.read(gpa, &mut bytes).unwrap();
        bytes
    }

    /// The smallest initial RAM disk that passes: an archive with its trailer alone, and `padding` zeroes.
    pub(crate) fn empty_cpio(padding: usize) -> Vec<u8> {
        let mut bytes = initrd::tests::newc("TRAILER!!!", b"");
        bytes.resize(bytes.len() + padding, 0);
        bytes
    }

    // covers: loader/bzimage
    #[test]
    fn a_bzimage_lies_where_its_header_wants_and_is_entered_at_200h() {
        let memory = Memory::new(64 << 20).unwrap();
        let mut image = bzimage(4096);
        image.extend(b"a signature");
        let entry = load(
            &memory,
            &Boot {
                cmdline: Some(b"quiet x=1"),
                ..boot(&image)
            },
        )
        .unwrap();
        assert_eq!(
            entry,
            Entry::Linux64 {
                rip: 0x100_0200,
                boot_params: ZERO_PAGE,
                cr3: PAGE_TABLES,
                gdt: GDT,
                gdt_limit: 31
            }
        );
        assert_eq!(read::<4>(&memory, 0x100_0200), [0, 1, 2, 3]);
        assert_eq!(
            read::<4>(&memory, 0x100_0ffe),
            [0xfe, 0xff, 0, 0],
            "what follows the kernel is not loaded"
        );
        assert_eq!(&read::<10>(&memory, CMDLINE), b"quiet x=1\0");
        let params: [u8; 4096] = read(&memory, ZERO_PAGE);
        assert_eq!(le32(&params, 0x228), Some(CMDLINE as u32), "cmd_line_ptr");
        assert_eq!(params[0x210], LOADER_UNDEFINED, "type_of_loader");
        assert_eq!(le32(&params, 0x70), Some(0xe0000), "acpi_rsdp_addr");
        assert_eq!(
            (le32(&params, 0x218), le32(&params, 0x21c)),
            (Some(0), Some(0)),
            "no ramdisk"
        );
        // __BOOT_CS is 64-bit code, __BOOT_DS flat data.
        let gdt: [u8; 32] = read(&memory, GDT);
        assert_eq!(gdt[0x10 + 5] & 0xfe, 0x9a);
        assert_eq!(gdt[0x10 + 6] & 0xf0, 0xa0);
        assert_eq!(gdt[0x18 + 5] & 0xfe, 0x92);
    }

    // covers: loader/identity-map
    #[test]
    fn the_page_tables_map_4_gib_one_to_one() {
        let memory = Memory::new(64 << 20).unwrap();
        load(&memory, &boot(&bzimage(4096))).unwrap();
        let entry = |table: u64, index: u64| u64::from_le_bytes(read(&memory, (table & !4095) + index * 8));
        for address in [0, 0x1f_ffff, 0x100_0200, 0xbfff_ffff, 0xfee0_0000, 0xffff_ffff] {
            let pdpte = entry(entry(PAGE_TABLES, 0), address >> 30);
            let pde = entry(pdpte, address >> 21 & 511);
            assert_eq!(pde & 0xfff, PAGE_SIZE | PRESENT_WRITABLE);
            assert_eq!(pde & !0xfff, address & !0x1f_ffff);
        }
        assert_eq!(entry(PAGE_TABLES, 1), 0);
    }

    // covers: loader/e820-zero-page
    #[test]
    fn the_zero_page_has_the_memory_map() {
        let memory = Memory::new(5 << 30).unwrap();
        load(&memory, &boot(&bzimage(4096))).unwrap();
        let params: [u8; 4096] = read(&memory, ZERO_PAGE);
        let map = e820::map(&memory);
        assert_eq!(usize::from(params[0x1e8]), map.len());
        for (n, entry) in map.iter().enumerate() {
            let at = 0x2d0 + n * 20;
            let quad = |at| u64::from_le_bytes(params[at..at + 8].try_into().unwrap());
            assert_eq!(quad(at)..quad(at) + quad(at + 8), entry.range);
            assert_eq!(le32(&params, at + 16), Some(entry.kind as u32));
        }
    }

    // covers: loader/initrd
    #[test]
    fn the_initrd_lies_as_high_as_memory_and_the_kernel_allow() {
        for (size, initrd_max, padding, expected) in [
            (64u64 << 20, 0x7fff_ffffu32, 0, 0x3ff_f000),
            (64 << 20, 0x2ff_ffff, 0, 0x2ff_f000),
            (5 << 30, 0x7fff_ffff, 0, 0x7fff_f000),
            (5 << 30, 0xffff_ffff, 0, 0xbfff_f000),
            (64 << 20, 0x7fff_ffff, 4096, 0x3ff_e000),
        ] {
            let memory = Memory::new(size).unwrap();
            let kernel = patched(0x22c, &initrd_max.to_le_bytes());
            let initrd = empty_cpio(padding);
            load(
                &memory,
                &Boot {
                    modules: &[module(&initrd)],
                    ..boot(&kernel)
                },
            )
            .unwrap();
            let params: [u8; 4096] = read(&memory, ZERO_PAGE);
            assert_eq!(le32(&params, 0x218), Some(expected));
            assert_eq!(le32(&params, 0x21c), Some(initrd.len() as u32));
            assert_eq!(&read::<6>(&memory, expected.into()), b"070701");
        }
    }

    // covers: loader/initrd-parts
    #[test]
    fn several_archives_are_one_initrd_each_from_a_multiple_of_four_on() {
        let kernel = patched(0x22c, &0x7fff_ffffu32.to_le_bytes());
        // A compressed one may have any length: a gzip member of nothing has 20 bytes, a zero makes it 21.
        let gzip = [
            &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &[0],
        ]
        .concat();
        let archive = empty_cpio(0);
        let memory = Memory::new(64 << 20).unwrap();
        memory.write((64 << 20) - 4096, &[0xff; 4096]).unwrap();
        let request = Boot {
            modules: &[module(&gzip), module(&archive)],
            ..boot(&kernel)
        };
        load(&memory, &request).unwrap();
        let mut params = [0; 4096];
        memory.read(ZERO_PAGE, &mut params).unwrap();
        let (at, len) = (le32(&params, 0x218).unwrap(), le32(&params, 0x21c).unwrap());
        let mut bytes = vec![0; len as usize];
        memory.read(at.into(), &mut bytes).unwrap();
        assert_eq!(bytes, [&gzip[..], &[0; 3], &archive].concat());
        // The second is what is wrong, and words are nothing that Linux could be told.
        for (second, says) in [
            (module(b"no archive"), "not an initial RAM disk"),
            (
                Module {
                    words: b"a b",
                    ..module(&archive)
                },
                "\"a b\" stands behind its name",
            ),
        ] {
            let request = Boot {
                modules: &[module(&archive), second],
                ..boot(&kernel)
            };
            let (input, error) = load(&memory, &request).unwrap_err();
            assert_eq!(input, Input::Module(1));
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    // covers: loader/short-paragraph
    #[test]
    fn the_last_paragraph_may_be_short() {
        let memory = Memory::new(64 << 20).unwrap();
        let whole = patched(0x22c, &0x7fff_ffffu32.to_le_bytes());
        for missing in [0, 1, 15] {
            let kernel = &whole[..whole.len() - missing];
            load(&memory, &boot(kernel)).unwrap_or_else(|error| panic!("{missing}: {error:?}"));
        }
        let (_, error) = load(&memory, &boot(&whole[..whole.len() - 16])).unwrap_err();
        assert!(error.to_string().contains("truncated: the kernel"), "{error}");
    }

    // covers: bad-input/initrd-does-not-fit
    #[test]
    fn an_initrd_that_does_not_fit_is_refused() {
        let memory = Memory::new(32 << 20).unwrap();
        let room = (32 << 20) - 0x120_0000;
        for (len, fits) in [(room, true), (room + 1, false), (64 << 20, false)] {
            let initrd = empty_cpio(len - empty_cpio(0).len());
            let result = load(
                &memory,
                &Boot {
                    modules: &[module(&initrd)],
                    ..boot(&bzimage(4096))
                },
            );
            match result {
                Ok(_) => assert!(fits),
                Err((input, error)) => {
                    assert!(!fits);
                    assert_eq!(input, Input::Module(0));
                    assert!(
                        error.to_string().contains("14M above the kernel; raise --memory"),
                        "{error}"
                    );
                }
            }
        }
    }

    // covers: bad-input/kernel-does-not-fit
    // covers: bad-input/unusable-kernel
    #[test]
    fn kernels_that_cannot_be_booted_say_why() {
        let memory = Memory::new(64 << 20).unwrap();
        for (kernel, says) in [
            (patched(0x1fe, &[0, 0]), "AA55H"),
            (patched(0x206, &0x020bu16.to_le_bytes()), "protocol 2.11"),
            (patched(0x211, &[0]), "zImage"),
            (patched(0x1f4, &[0; 4]), "no protected-mode code"),
            (patched(0x1f4, &[0xff; 4]), "truncated"),
            (patched(0x1f1, &[0xff]), "truncated"),
            (patched(0x258, &0x1000u64.to_le_bytes()), "0x1000"),
            (patched(0x258, &0x100_0001u64.to_le_bytes()), "0x1000001"),
            (patched(0x258, &(u64::MAX & !4095).to_le_bytes()), "--memory"),
            (patched(0x258, &0x3f0_0000u64.to_le_bytes()), "--memory"),
            (patched(0x260, &0xffff_ffffu32.to_le_bytes()), "--memory"),
            (patched(0x260, &0x300_0001u32.to_le_bytes()), "memory up to 65M"),
        ] {
            let (input, error) = load(&memory, &boot(&kernel)).unwrap_err();
            assert_eq!(input, Input::Kernel);
            assert!(error.to_string().contains(says), "{error}");
        }
        load(&memory, &boot(&patched(0x260, &0x300_0000u32.to_le_bytes()))).unwrap();
        load(&memory, &boot(&patched(0x258, &[0; 8]))).unwrap();
        load(&memory, &boot(&patched(0x1f1, &[0]))).unwrap();
    }

    // covers: loader/cmdline-limit
    #[test]
    fn the_header_limits_the_command_line() {
        let memory = Memory::new(64 << 20).unwrap();
        let room = CMDLINE_ROOM as usize;
        for (max, len, fits) in [
            (2047u32, 2047usize, true),
            (2047, 2048, false),
            (0, 0, true),
            (0, 1, false),
            (u32::MAX, room - 1, true),
            (u32::MAX, room, false),
        ] {
            let kernel = patched(0x238, &max.to_le_bytes());
            let cmdline = vec![b'x'; len];
            let result = load(
                &memory,
                &Boot {
                    cmdline: Some(&cmdline),
                    ..boot(&kernel)
                },
            );
            match result {
                Ok(_) => assert!(fits, "{max} {len}"),
                Err((input, _)) => assert!(!fits && input == Input::Cmdline, "{max} {len}"),
            }
        }
        load(&memory, &boot(&bzimage(4096))).unwrap();
        let mut text = [0; 14];
        memory.read(CMDLINE, &mut text).unwrap();
        assert_eq!(&text, b"console=ttyS0\0", "the default");
    }

    #[test]
    fn fields_beyond_a_short_header_are_not_taken_from_the_file() {
        let memory = Memory::new(64 << 20).unwrap();
        // The header of protocol 2.12 ends before `kernel_info_offset` at 268H.
        let mut kernel = patched(0x201, &[0x66]);
        kernel[0x264..0x26c].fill(0xee);
        load(&memory, &boot(&kernel)).unwrap();
        assert_eq!(
            read::<8>(&memory, ZERO_PAGE + 0x264),
            [0xee, 0xee, 0xee, 0xee, 0, 0, 0, 0]
        );
    }

    // covers: bad-input/truncated-kernel
    #[test]
    fn every_truncation_is_an_error() {
        let memory = Memory::new(64 << 20).unwrap();
        let image = bzimage(64 << 10);
        for len in (0..image.len()).step_by(512).chain([image.len() - 16]) {
            let (input, error) = crate::loader::load(&memory, &boot(&image[..len])).unwrap_err();
            assert_eq!(input, Input::Kernel);
            if len > HDRS + 4 {
                assert!(matches!(error, LoadError::Truncated { .. }), "{len}: {error}");
            }
        }
        crate::loader::load(&memory, &boot(&image)).unwrap();
    }
}
