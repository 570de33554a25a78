//! A map from numbers to things, for sets that are kept in many versions of which one differs little from the next: a copy
//! shares everything, and two of them tell quickly where they differ.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers of a region.
const REGION: u64 = 512;

type Region<T> = Vec<Option<Arc<T>>>;

/// The map. A copy shares the things.
#[derive(PartialEq, Eq)]
pub struct Sparse<T> {
    /// By number divided by a region's length; none without a thing.
    regions: BTreeMap<u64, Arc<Region<T>>>,
}

impl<T> Clone for Sparse<T> {
    fn clone(&self) -> Self {
        Sparse {
            regions: self.regions.clone(),
        }
    }
}

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Sparse {
            regions: BTreeMap::new(),
        }
    }
}

impl<T> Sparse<T> {
    /// The thing with this number.
    pub fn get(&self, number: u64) -> Option<&Arc<T>> {
        self.regions.get(&(number / REGION))?[(number % REGION) as usize].as_ref()
    }

    /// Puts a thing in the place of what was there, or takes it away.
    pub fn set(&mut self, number: u64, thing: Option<Arc<T>>) {
        let (region, index) = (number / REGION, (number % REGION) as usize);
        if thing.is_none() && !self.regions.contains_key(&region) {
            return;
        }
        let empty = || Arc::new((0..REGION).map(|_| None).collect());
        let things = self.regions.entry(region).or_insert_with(empty);
        Arc::make_mut(things)[index] = thing;
        if things.iter().all(Option::is_none) {
            self.regions.remove(&region);
        }
    }

    /// The thing with this number, if no copy of the map has it too.
    pub fn own(&mut self, number: u64) -> Option<&mut T> {
        let region = Arc::get_mut(self.regions.get_mut(&(number / REGION))?)?;
        Arc::get_mut(region[(number % REGION) as usize].as_mut()?)
    }

    /// All things with their numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.regions.iter().flat_map(|(region, things)| {
            let numbers = region * REGION..;
            let things = numbers.zip(things.iter());
            things.filter_map(|(number, thing)| Some((number, thing.as_deref()?)))
        })
    }

    /// The numbers whose things the two do not share.
    pub fn apart<'a>(&'a self, other: &'a Sparse<T>) -> impl Iterator<Item = u64> + 'a {
        let both = self
            .regions
            .keys()
            .chain(other.regions.keys().filter(|number| !self.regions.contains_key(number)));
        let apart = both.filter(|number| match (self.regions.get(number), other.regions.get(number)) {
            (Some(ours), Some(theirs)) => !Arc::ptr_eq(ours, theirs),
            _ => true,
        });
        apart
            .flat_map(|region| region * REGION..(region + 1) * REGION)
            .filter(|&number| match (self.get(number), other.get(number)) {
                (Some(ours), Some(theirs)) => !Arc::ptr_eq(ours, theirs),
                (None, None) => false,
                _ => true,
            })
    }
}

#[cfg(test)]
#[path = "sparse_test.rs"]
mod tests;
