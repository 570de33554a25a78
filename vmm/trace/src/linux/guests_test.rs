//! Guests below a hypervisor: memory through EPT by SDM Vol. 3C 29.3.2 "EPT Translation Mechanism", and the Linux in it.

use super::super::hostile_test::{guest, structures};
use super::*;

/// Memory of the machine.
struct Host {
    bytes: Vec<u8>,
    read: u64,
}

impl Memory for Host {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        let at = usize::try_from(gpa).ok();
        let Some(from) = at.and_then(|at| self.bytes.get(at..)?.get(..bytes.len())) else {
            return false;
        };
        bytes.copy_from_slice(from);
        self.read += bytes.len() as u64;
        true
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.bytes.len() as u64).collect()
    }
}

impl Host {
    fn word(&mut self, at: u64, value: u64) {
        let at = at as usize;
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// A VMCS, with an EPT or without.
    fn vmcs(&mut self, at: u64, ept: Option<u64>) {
        let field = |field: Field| at + 8 * field.slot() as u64;
        self.word(field(Field::PRIMARY_CONTROLS), 1 << 31);
        self.word(field(Field::SECONDARY_CONTROLS), if ept.is_some() { 2 } else { 0 });
        self.word(field(Field::EPT_POINTER), ept.unwrap_or(0));
    }
}

const LARGE: u64 = 2 << 20;
/// Write-back, four levels.
const POINTER: u64 = 0x1_0000 | 0x1e;
const VMCS: [u64; 3] = [0x8000, 0x9000, 0xa000];

/// A guest whose memory lies backwards in the machine's, in large pages but for one.
fn host() -> Host {
    let types = super::super::hostile_test::btf(&structures());
    let of_guest = guest(&types).bytes;
    let pages = of_guest.len() as u64 / LARGE;
    let mut host = Host {
        bytes: vec![0; ((pages + 2) * LARGE) as usize],
        read: 0,
    };
    host.word(0x1_0000, 0x1_1000 | 7);
    host.word(0x1_1000, 0x1_2000 | 7);
    for n in 0..pages {
        let (at, from) = ((pages - n) * LARGE, (n * LARGE) as usize);
        host.bytes[at as usize..(at + LARGE) as usize].copy_from_slice(&of_guest[from..from + LARGE as usize]);
        host.word(0x1_2000 + 8 * n, at | 1 << 7 | 6 << 3 | 7);
    }
    // The kernel's first 2 MByte, in pages of 4 KByte.
    let n = 0x100_0000 / LARGE;
    host.word(0x1_2000 + 8 * n, 0x1_3000 | 7);
    for page in 0..512 {
        host.word(0x1_3000 + 8 * page, (pages - n) * LARGE + page * 0x1000 | 6 << 3 | 7);
    }
    host.vmcs(VMCS[0], Some(POINTER));
    host.vmcs(VMCS[1], Some(POINTER));
    host.vmcs(VMCS[2], None);
    host
}

// covers: symbols/guests
#[test]
fn a_guests_kernel_is_found_through_ept() {
    let mut host = host();
    let mut guests = Guests::default();
    guests.entered(&mut host, VMCS[0], 10);
    assert!(guests.look(&mut host, 100));
    // Another processor of the same guest, and a guest without EPT.
    guests.entered(&mut host, VMCS[1], 200);
    guests.entered(&mut host, VMCS[2], 300);
    guests.look(&mut host, 400);
    // The VMCS becomes another guest's, of which nothing is known.
    host.vmcs(VMCS[0], Some(0x2_0000 | 0x1e));
    guests.entered(&mut host, VMCS[0], 500);
    guests.look(&mut host, 600);

    let dir = std::env::temp_dir().join(format!("minivmm-guests-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    guests.write(&dir).unwrap();
    let found = RecordedGuests::read(&dir).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    let [guest] = &found.guests[..] else {
        panic!("{} guests", found.guests.len())
    };
    assert_eq!(guest.banner, "Linux version 6.1.0-test (x) #1");
    assert!(guest.symbols.address("_text").is_some());
    assert_eq!(guest.modules[0].0, "fine");
    assert_eq!(guest.tasks[0].task.comm, "init");
    for (pointer, steps, of, why) in [
        (VMCS[0], 20, Some(0), "what is found later holds before"),
        (VMCS[0], 499, Some(0), "as long as it is this guest's"),
        (VMCS[0], 500, None, "then it is another's"),
        (VMCS[1], 1000, Some(0), "of the same EPT"),
        (VMCS[2], 1000, None, "no EPT"),
        (0xb000, 1000, None, "never entered"),
    ] {
        assert_eq!(found.of(pointer, steps), of, "{why}");
    }
}

/// Tables that lead back to themselves map all there is, from one page.
// covers: symbols/guests
#[test]
fn an_ept_without_end_is_read_to_an_end() {
    let mut host = host();
    for n in 0..512 {
        host.word(0x1_0000 + 8 * n, 0x1_0000 | 7);
    }
    let mut guests = Guests::default();
    for look in 0..100 {
        guests.entered(&mut host, VMCS[0], look);
        guests.look(&mut host, look);
    }
    assert!(guests.found.is_empty());
    assert!(host.read < 2 << 30, "{}", host.read);
}

// covers: symbols/guests
#[test]
fn a_list_of_guests_that_is_none_is_refused() {
    let dir = std::env::temp_dir().join(format!("minivmm-no-guests-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir(&dir).unwrap();
    for text in [
        "guest 1 0x1000\n",
        "vmcs 1 0x1000 0\n",
        "vmcs x 0x1000 -\n",
        "vmcs 1 1000 -\n",
        "else\n",
        "guest 0\n",
    ] {
        fs::write(dir.join(GUESTS), text).unwrap();
        let error = RecordedGuests::read(&dir).unwrap_err().to_string();
        assert!(error.starts_with("guests: line 1: "), "{text}: {error}");
    }
    fs::remove_dir_all(&dir).unwrap();
}

/// Parts number guests as they find them.
// covers: symbols/guests
#[test]
fn guests_of_parts_are_joined_by_their_kernels() {
    let dir = std::env::temp_dir().join(format!("minivmm-joined-guests-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    let parts = [dir.join("a"), dir.join("b")];
    let texts = [
        "guest 0 0x1000\nvmcs 5 0x8000 -\nvmcs 9 0x8000 0\n",
        "guest 0 0x2000\nguest 1 0x1000\nvmcs 20 0x8000 -\nvmcs 30 0x9000 -\nvmcs 40 0x9000 0\nvmcs 41 0x8000 1\n",
    ];
    for (part, text) in parts.iter().zip(texts) {
        fs::create_dir_all(part).unwrap();
        fs::write(part.join(GUESTS), text).unwrap();
    }
    let into = dir.join("all");
    fs::create_dir(&into).unwrap();
    join(&parts, &into, &|_, _| Ok(())).unwrap();
    let joined = fs::read_to_string(into.join(GUESTS)).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    let wanted =
        "guest 0 0x1000\nguest 1 0x2000\nvmcs 5 0x8000 -\nvmcs 9 0x8000 0\nvmcs 30 0x9000 -\nvmcs 40 0x9000 1\n";
    assert_eq!(joined, wanted);
}
