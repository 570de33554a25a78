//! Who is each debug and trace unit: the host's hardware, ours, or nobody.

/// What the user wishes for a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Wish {
    /// The host's hardware, as KVM gives it to guests.
    Host,
    /// Our unit, fed by the software engine.
    Emulated,
    /// The guest has none.
    Off,
}

/// Who is a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Resolved {
    /// The host's hardware.
    Host,
    /// Our unit.
    Emulated,
    /// The guest has none.
    #[default]
    Absent,
}

/// A value for each unit that can be wished for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // They are the units' names.
pub struct PerUnit<T> {
    pub dr: T,
    pub lbr: T,
    pub bts: T,
    pub pebs: T,
    pub pmu: T,
    pub pt: T,
    pub tsc: T,
    pub rdt: T,
}

/// What the user wishes.
pub type Wishes = PerUnit<Option<Wish>>;
/// What each unit is.
pub type Resolution = PerUnit<Resolved>;

impl<T: Copy> PerUnit<T> {
    /// Every unit by name.
    pub fn each(&self) -> [(&'static str, T); 8] {
        [
            ("dr", self.dr),
            ("lbr", self.lbr),
            ("bts", self.bts),
            ("pebs", self.pebs),
            ("pmu", self.pmu),
            ("pt", self.pt),
            ("tsc", self.tsc),
            ("rdt", self.rdt),
        ]
    }

    /// Another value for every unit, by its name and what it has now.
    ///
    /// # Errors
    /// The first of `f`'s.
    pub fn try_map<U, E>(&self, mut f: impl FnMut(&'static str, T) -> Result<U, E>) -> Result<PerUnit<U>, E> {
        Ok(PerUnit {
            dr: f("dr", self.dr)?,
            lbr: f("lbr", self.lbr)?,
            bts: f("bts", self.bts)?,
            pebs: f("pebs", self.pebs)?,
            pmu: f("pmu", self.pmu)?,
            pt: f("pt", self.pt)?,
            tsc: f("tsc", self.tsc)?,
            rdt: f("rdt", self.rdt)?,
        })
    }
}

/// Why a unit cannot be taken from a guest, if it cannot.
pub fn never_off(unit: &str) -> Option<&'static str> {
    matches!(unit, "dr" | "tsc").then_some("every processor has it")
}
