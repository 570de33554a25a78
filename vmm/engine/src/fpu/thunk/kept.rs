//! The thunks that have been made: kept for the life of the process, each once.
#![allow(unsafe_code)] // An address that code was put at becomes a function.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock};

use super::evex_form::EvexForm;
use super::recipe::Recipe;
use super::{Entry, NoThunk};
use crate::code_memory::CodeMemory;

/// Bytes for every form with every immediate, several times over.
const ROOM: usize = 16 << 20;

struct Kept {
    memory: CodeMemory,
    /// Where code stands.
    known: HashMap<Vec<u8>, Entry>,
    /// What each was made from, by its address.
    recipes: HashMap<usize, Arc<Recipe>>,
}

/// The process's thunks; none where the system gives no executable memory.
fn kept() -> Option<&'static Mutex<Kept>> {
    static KEPT: OnceLock<Option<Mutex<Kept>>> = OnceLock::new();
    KEPT.get_or_init(|| {
        let memory = CodeMemory::map(c"engine-thunks", ROOM)?;
        Some(Mutex::new(Kept {
            memory,
            known: HashMap::new(),
            recipes: HashMap::new(),
        }))
    })
    .as_ref()
}

/// Whether thunks can be made here: to be asked before a guest runs, which could only be told #UD.
pub fn available() -> bool {
    kept().is_some()
}

/// What the thunk at an address was made from.
pub(crate) fn recipe(entry: usize) -> Option<Arc<Recipe>> {
    let kept = kept()?.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    kept.recipes.get(&entry).cloned()
}

/// Where a thunk with this code is entered; it is added if it is new.
pub(super) fn entry(code: &[u8], recipe: Recipe) -> Result<Entry, NoThunk> {
    let kept = kept().ok_or(NoThunk::NoMemory)?;
    // A panic cannot leave an entry half made: the table is written last.
    let mut kept = kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(&entry) = kept.known.get(code) {
        return Ok(entry);
    }
    let at = kept.memory.put(code).ok_or(NoThunk::NoMemory)?;
    // SAFETY: Complete code of this signature stands there, and for ever: what is in a static is not dropped.
    let entry = unsafe { core::mem::transmute::<*const u8, Entry>(at) };
    kept.recipes.insert(at as usize, Arc::new(recipe));
    kept.known.insert(code.to_vec(), entry);
    Ok(entry)
}

/// The one copy of a form that is kept for the life of the process. Those that tables execute need no executable memory.
pub(super) fn form(form: EvexForm) -> &'static EvexForm {
    static FORMS: Mutex<Option<HashSet<&'static EvexForm>>> = Mutex::new(None);
    // A panic leaves at most a form that is not in the set.
    let mut forms = FORMS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let forms = forms.get_or_insert_default();
    if let Some(&known) = forms.get(&form) {
        return known;
    }
    let known: &'static EvexForm = Box::leak(Box::new(form));
    forms.insert(known);
    known
}
