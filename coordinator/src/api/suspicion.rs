//! Whether a request is the reason that replicas break under it. Whoever was there when two replicas broke, one after the
//! other and without a token for it in between, is a suspect. Suspects are tried one at a time, so that of many that met
//! the same breaks those that are innocent get a token and go on, and the one that is not is known by the breaks that
//! it met as the only suspect.
//! Invariant: a wait for one's turn ends, and whatever happens no request breaks more than [`MOST`] replicas in a row.
//! Not here: which breaks count ([`BreakCause`](crate::served::BreakCause)); the waits for replicas
//! ([`placement`](super::placement)).

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

/// Breaks that make a suspect.
const TOGETHER: usize = 2;
/// Breaks as the only suspect that convict it.
const ALONE: usize = 2;
/// Breaks that convict it in any case.
const MOST: usize = 8;
/// Longest wait for a turn: the one who has it may wait for its client.
const PATIENCE: Duration = Duration::from_secs(5);

/// The turn of suspects; cheap to clone, all clones are one.
#[derive(Clone)]
pub struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// What is held against a request.
pub struct Suspicion {
    turns: Turns,
    turn: Option<OwnedSemaphorePermit>,
    num_breaks: usize,
    num_alone: usize,
}

impl Suspicion {
    /// None yet.
    pub fn new(turns: Turns) -> Self {
        Self { turns, turn: None, num_breaks: 0, num_alone: 0 }
    }

    /// A token came: it is innocent.
    pub fn clear(&mut self) {
        (self.turn, self.num_breaks, self.num_alone) = (None, 0, 0);
    }

    /// A replica broke while it ran the request.
    ///
    /// # Errors
    /// The number of breaks, if it is to be given to no other.
    pub fn broke(&mut self) -> Result<(), usize> {
        self.num_breaks += 1;
        self.num_alone += usize::from(self.turn.take().is_some());
        if self.num_alone >= ALONE || self.num_breaks >= MOST { Err(self.num_breaks) } else { Ok(()) }
    }

    /// Waits for its turn if it is a suspect, until `limit` at most.
    pub async fn turn(&mut self, limit: Instant) {
        if self.num_breaks < TOGETHER || self.turn.is_some() {
            return;
        }
        let turn = Arc::clone(&self.turns.0).acquire_owned();
        let limit = limit.min(Instant::now() + PATIENCE);
        // Who waited in vain goes along with the others.
        self.turn = timeout_at(limit, turn).await.ok().and_then(Result::ok);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn the_guilty_one_is_found_and_the_innocent_go_on() {
        let turns = Turns::default();
        let [mut innocent, mut guilty] = [(); 2].map(|()| Suspicion::new(turns.clone()));
        for _ in 0..TOGETHER {
            for suspect in [&mut innocent, &mut guilty] {
                suspect.turn(later()).await;
                assert_eq!(suspect.broke(), Ok(()));
            }
        }
        innocent.turn(later()).await;
        // The other waits until the first has its token.
        let waits = tokio::spawn(async move {
            guilty.turn(later()).await;
            guilty
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!waits.is_finished());
        innocent.clear();
        let mut guilty = waits.await.unwrap();
        assert_eq!(guilty.broke(), Ok(()));
        guilty.turn(later()).await;
        assert_eq!(guilty.broke(), Err(TOGETHER + ALONE));
        assert_eq!(innocent.broke(), Ok(()));
    }

    #[tokio::test]
    async fn nobody_waits_or_breaks_replicas_for_ever() {
        let turns = Turns::default();
        let mut first = Suspicion::new(turns.clone());
        let mut second = Suspicion::new(turns);
        for suspect in [&mut first, &mut second] {
            for _ in 0..TOGETHER {
                assert_eq!(suspect.broke(), Ok(()));
            }
        }
        first.turn(later()).await;
        for _ in TOGETHER..MOST - 1 {
            second.turn(Instant::now() + Duration::from_millis(20)).await;
            assert_eq!(second.broke(), Ok(()));
        }
        assert_eq!(second.broke(), Err(MOST));
    }
}
