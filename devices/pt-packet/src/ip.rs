use serde::{Deserialize, Serialize};

/// The IPBytes field of an IP packet: how many bytes follow and how they make an address. SDM Vol. 3C Table "FUP/TIP IP
/// Reconstruction" in 33.4.2.2 "Target IP (TIP) Packet".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IpBytes {
    /// No payload: the IP is out of context.
    Suppressed = 0,
    /// 16 bits; the rest from the last IP.
    Update16 = 1,
    /// 32 bits; the rest from the last IP.
    Update32 = 2,
    /// 48 bits, sign-extended.
    Sext48 = 3,
    /// 48 bits; the rest from the last IP.
    Update48 = 4,
    /// All 64 bits.
    Full = 6,
}

impl IpBytes {
    /// From the field's three bits; 5 and 7 are reserved.
    pub const fn from_bits(bits: u8) -> Option<IpBytes> {
        Some(match bits {
            0 => IpBytes::Suppressed,
            1 => IpBytes::Update16,
            2 => IpBytes::Update32,
            3 => IpBytes::Sext48,
            4 => IpBytes::Update48,
            6 => IpBytes::Full,
            _ => return None,
        })
    }

    /// How many bytes of IP follow the header.
    pub const fn len(self) -> usize {
        match self {
            IpBytes::Suppressed => 0,
            IpBytes::Update16 => 2,
            IpBytes::Update32 => 4,
            IpBytes::Sext48 | IpBytes::Update48 => 6,
            IpBytes::Full => 8,
        }
    }

    /// Whether no byte follows.
    pub const fn is_empty(self) -> bool {
        matches!(self, IpBytes::Suppressed)
    }
}

/// The last IP that was sent, from which the next one borrows its upper bytes. It is 0 after a PSB,
/// and after an OVF, since the IP that was sent last may be among what was lost. SDM Vol. 3C 33.4.2.2, "IP Compression".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastIp(pub u64);

impl LastIp {
    /// As after a PSB.
    pub const fn new() -> LastIp {
        LastIp(0)
    }

    /// Forgets the last IP, as PSB and OVF do.
    #[inline]
    pub const fn reset(&mut self) {
        self.0 = 0;
    }

    /// The IP of a payload, which becomes the last IP; `None` where it is suppressed. Bits of `payload` above its own are
    /// ignored.
    #[inline]
    pub const fn expand(&mut self, bytes: IpBytes, payload: u64) -> Option<u64> {
        const LOW16: u64 = 0xffff;
        const LOW32: u64 = 0xffff_ffff;
        const LOW48: u64 = 0xffff_ffff_ffff;
        self.0 = match bytes {
            IpBytes::Suppressed => return None,
            IpBytes::Update16 => self.0 & !LOW16 | payload & LOW16,
            IpBytes::Update32 => self.0 & !LOW32 | payload & LOW32,
            IpBytes::Sext48 => ((payload << 16) as i64 >> 16) as u64,
            IpBytes::Update48 => self.0 & !LOW48 | payload & LOW48,
            IpBytes::Full => payload,
        };
        Some(self.0)
    }

    /// The shortest form in which `ip` can be sent. Of two forms of the same length the one that stands alone is taken.
    #[inline]
    pub const fn shortest(self, ip: u64) -> IpBytes {
        use IpBytes::{Full, Sext48, Update16, Update32, Update48};
        // By the highest 16-bit group that differs from the last IP; then the same for an IP that 48 bits and their sign give.
        const CHOICE: [IpBytes; 8] = [Update16, Update32, Update48, Full, Update16, Update32, Sext48, Sext48];
        let differs = (63 - ((self.0 ^ ip) | 1).leading_zeros()) >> 4;
        let canonical = ((ip << 16) as i64 >> 16) as u64 == ip;
        CHOICE[((canonical as usize) << 2 | differs as usize) & 7]
    }
}
