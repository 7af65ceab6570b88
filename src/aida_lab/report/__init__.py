"""From run folders to tables, figures and one page. Reads folders only, so runs may have been made anywhere."""
