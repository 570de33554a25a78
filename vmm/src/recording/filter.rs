//! What of a guest a recording has in it.

/// What is traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// CPL 0.
    Kernel,
    /// CPL 1 to 3.
    User,
    /// One address space: CR3 without bits 4:0.
    Cr3(u64),
    /// Linear addresses, both inclusive.
    Ip(u64, u64),
    /// A process by its name, as `ps` shows it: what it does, and what the kernel does on its behalf.
    Comm(String),
    /// A process by its number.
    Pid(u32),
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Filter::Kernel => f.write_str("kernel"),
            Filter::User => f.write_str("user"),
            Filter::Cr3(cr3) => write!(f, "cr3={cr3:#x}"),
            Filter::Ip(first, last) => write!(f, "ip={first:#x}-{last:#x}"),
            Filter::Comm(name) => write!(f, "comm={name}"),
            Filter::Pid(number) => write!(f, "pid={number}"),
        }
    }
}
